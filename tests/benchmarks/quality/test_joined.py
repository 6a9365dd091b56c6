"""Rows of a later run in the file of an earlier one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import joined as script
from benchmarks.quality.joined import joined
from benchmarks.quality.tables import provenance


def file(created: str, value: float = 0.9, **rows: float) -> dict[str, Any]:
    """A file with a score per row."""
    scores = {"16-bit": value, **rows}
    return {
        "schema": "duotone.schemes/1",
        "created": created,
        "commit": f"{created[-1]} of Nov",
        "versions": {"torch": created},
        "device": "CPU",
        "task": "captions",
        "headline": "cider",
        "later_question": True,
        "samples": 8,
        "schemes": {
            name: {"metrics": {"cider": {"value": x, "low": x - 0.1, "high": x + 0.1}}}
            for name, x in scores.items()
        },
        "differences": {f"{name} - 16-bit": {"cider": x - value} for name, x in rows.items()},
    }


OLD, NEW = file("2026-11-01", a=0.5, b=0.6), file("2026-11-02", 0.92, b=0.8, c=0.7)


def test_rows_of_the_later_file_take_the_place_of_others() -> None:
    found = joined(OLD, NEW)
    values = {name: row["metrics"]["cider"]["value"] for name, row in found["schemes"].items()}
    assert values == {"16-bit": 0.9, "a": 0.5, "b": 0.8, "c": 0.7}
    apart = {name: round(x["cider"], 2) for name, x in found["differences"].items()}
    assert apart == {"a - 16-bit": -0.4, "b - 16-bit": -0.12, "c - 16-bit": -0.22}
    assert [source["created"] for source in found["sources"]] == ["2026-11-01", "2026-11-02"]
    assert "commit 1 of Nov, 2 of Nov; 2026-11-02" in provenance([found])
    again = joined(found, file("2026-11-03", d=0.1))
    assert [source["created"][-1] for source in again["sources"]] == ["1", "2", "3"]


def test_files_of_other_samples_or_scores_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"they differ in \['samples'\]"):
        joined(OLD, NEW | {"samples": 9})
    with pytest.raises(ValueError, match=r"one score in 16 bit; got 0\.9 and 0\.96"):
        joined(OLD, file("2026-11-02", 0.96))


def test_all_files_of_a_folder_are_joined(tmp_path: Path, monkeypatch, capsys) -> None:
    for folder, data in (("old", OLD), ("new", NEW)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "captions.json").write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["joined", str(tmp_path / "new"), str(tmp_path / "old")])
    script.main()
    path = tmp_path / "old" / "captions.json"
    assert capsys.readouterr().out == f"{path}\n"
    assert json.loads(path.read_text(encoding="utf-8")) == joined(OLD, NEW)
