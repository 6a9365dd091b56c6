"""Tables that a repository names in its pyproject.toml."""

import sys
from pathlib import Path

import pytest

from duotone.report import tables as report
from duotone.report.local import local_renderers

DOOR = """
def render(results):
    return f"{len(results)} results"

RENDERERS = {"mine": ("mine/1", render)}
"""


def repository(folder: Path, entry: str, door: str | None = DOOR) -> Path:
    (folder / "pyproject.toml").write_text(entry)
    if door is not None:
        (folder / "shown").mkdir()
        (folder / "shown/__init__.py").write_text(door)
    return folder


ENTRY = '[tool.duotone.report]\ntables = "shown"\n'


def test_a_repository_without_an_entry_has_none(tmp_path):
    assert local_renderers(tmp_path) == {}
    assert local_renderers(repository(tmp_path, "[project]\nname = 'x'\n")) == {}


def test_its_renderers_get_its_results(tmp_path):
    home = repository(tmp_path, ENTRY)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/a.json").write_text('{"schema": "mine/1"}')
    assert report.tables(tmp_path / "results", home) == {"mine": "1 results"}


def test_its_renderers_may_import_from_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    door = DOOR.replace("    return", "    from words_of_mine import WORDS\n    return WORDS +")
    found = local_renderers(repository(tmp_path, ENTRY, door))
    (tmp_path / "words_of_mine").with_suffix(".py").write_text('WORDS = "in all "')
    assert found["mine"][1]([]) == "in all 0 results"


@pytest.mark.parametrize(("entry", "door"), [(ENTRY, None), (ENTRY, "x = 1")])
def test_a_package_that_is_not_there_or_lacks_renderers_is_named(tmp_path, entry, door):
    with pytest.raises(ValueError, match=r"__init__.py"):
        local_renderers(repository(tmp_path, entry, door))
