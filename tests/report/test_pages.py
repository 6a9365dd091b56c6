from pathlib import Path

import pytest
from typer.testing import CliRunner

from duotone.cli import app
from duotone.report import pages
from duotone.report.tables import tables

from paths import REPOSITORY

PAGES = ["README.md", "docs/one.md", "results/quality/README.md"]
PAGE = "<!-- duotone:counts -->\n<!-- /duotone:counts -->\n"
DOOR = 'RENDERERS = {"counts": ("counts/1", lambda found: "| {count} |".format(**found[0]))}'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository with three pages of one table and one page without."""
    for folder in ("docs", "results/quality"):
        (tmp_path / folder).mkdir(parents=True)
    for page in PAGES:
        (tmp_path / page).write_text(PAGE)
    (tmp_path / "docs/words.md").write_text("words\n")
    (tmp_path / "results/quality/a.json").write_text('{"schema": "counts/1", "count": 16}')
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/__init__.py").write_text(DOOR)
    (tmp_path / "pyproject.toml").write_text('[tool.duotone.report]\ntables = "tables"')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *arguments])
    return done.exit_code, done.output


def test_marked_tables_are_replaced_and_the_rest_stays():
    text = "before\n<!-- duotone:quality -->\nold\n<!-- /duotone:quality -->\nafter\n"
    once = pages.update_text(text, {"quality": "| new |"})
    assert once == "before\n<!-- duotone:quality -->\n| new |\n<!-- /duotone:quality -->\nafter\n"
    assert pages.update_text(once, {"quality": "| new |"}) == once


@pytest.mark.parametrize(
    "text",
    [
        "<!-- duotone:quality -->\n| 1 |\n",
        "| 1 |\n<!-- /duotone:quality -->\n",
        "<!-- duotone:quality -->\n| 1 |\n<!-- /duotone:divergence -->\n",
        f"<!-- duotone:quality -->\nwords\n{PAGE}",
    ],
    ids=["no end", "no begin", "another's end", "two begins"],
)
def test_a_marker_without_its_partner_raises(text: str):
    with pytest.raises(ValueError, match="must come in pairs"):
        pages.update_text(text, {"quality": "", "divergence": ""})


def test_a_table_of_another_page_is_named_with_its_page(home: Path):
    (home / "docs/one.md").write_text(PAGE.replace("counts", "speed"))
    code, said = run()
    assert code == 2
    assert "one.md" in said
    assert "none for 'speed'" in said


def test_the_command_finds_all_marked_pages_and_no_other(home: Path):
    found = pages.marked_pages("results")
    assert [str(page) for page in found] == PAGES
    assert run("--check")[0] == 1
    assert (home / "README.md").read_text() == PAGE
    assert run()[0] == 0
    assert all("| 16 |" in page.read_text() for page in found)
    assert (home / "docs/words.md").read_text() == "words\n"
    assert run("--check") == (0, "3 of 3 pages were up to date\n")


@pytest.mark.parametrize("page", PAGES)
def test_one_page_out_of_date_fails_the_check(home: Path, page: str):
    run()
    (home / page).write_text((home / page).read_text().replace("| 16 |", "| typed |"))
    code, said = run("--check")
    assert code == 1
    assert said.splitlines() == [f"{page}: out of date", "2 of 3 pages were up to date"]


def test_the_command_takes_pages_by_name(home: Path):
    assert run("docs/one.md")[0] == 0
    assert "| 16 |" in (home / "docs/one.md").read_text()
    assert (home / "README.md").read_text() == PAGE
    code, said = run("docs/gone.md")
    assert code == 2
    assert "must be an existing file" in said


def test_tables_are_printed_and_no_page_changes(home: Path):
    code, said = run("--print")
    assert code == 0
    assert "## counts\n" in said
    assert "| 16 |" in said
    assert (home / "README.md").read_text() == PAGE


def test_a_folder_without_a_marked_page_says_so(home: Path):
    for page in pages.marked_pages("results"):
        page.write_text("words\n")
    code, said = run()
    assert code == 2
    assert "take --print" in " ".join(said.split())


@pytest.mark.parametrize("arguments", [[], ["--print"], ["--json"]])
def test_a_folder_without_tables_says_so(home: Path, arguments: list[str]):
    (home / "results/quality/a.json").unlink()
    code, said = run(*arguments)
    assert code == 2
    assert "must have a result file" in " ".join(said.split())


def test_a_missing_folder_is_refused(home: Path):
    assert run("--results", "gone")[0] == 2


def test_the_pages_of_this_repository_are_up_to_date(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    rendered = tables("results")
    found = pages.marked_pages("results")
    assert [str(page) for page in found if pages.update_file(page, rendered, write=False)] == []
