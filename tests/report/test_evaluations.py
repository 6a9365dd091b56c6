"""Tables of results that `duotone evaluate` writes."""

import json

from typer.testing import CliRunner

from duotone.cli import app
from duotone.report.evaluations import evaluation_table

from made_up_results import HEADER, interval


def result(scheme, bits, task="documents", **metrics):
    return HEADER | {
        "schema": "duotone.evaluate/1",
        "configuration": {"task": task, "model": {"name": "mine"}, "scheme": scheme},
        "samples": 9,
        "complete": True,
        "metrics": {name: interval(value) for name, value in metrics.items()},
        "memory": {"bits_per_element": bits, "visual_bits_per_element": None},
    }


def test_results_of_one_task_stand_together_by_bits():
    kivi, dense = result("kivi", 2.5, anls=0.8, kl=0.1), result("16-bit", 16.0, anls=0.9)
    shown = evaluation_table([kivi, result("kivi", 3.5, "captions", cider=1.5), dense])
    assert shown.index("captions, mine, 9 samples:") < shown.index("documents, mine, 9 samples:")
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert rows[-2:] == [
        "| 16-bit | 16.00 | 0.900 ± 0.010 | - |",
        "| kivi | 2.50 | 0.800 ± 0.010 | 0.100 ± 0.010 |",
    ]
    assert "NVIDIA H200" in shown


def test_bits_are_those_of_pictures_where_they_are_counted_apart():
    pictured, other = result("duotone", 12.0, anls=0.8), result("kivi", 2.5, anls=0.8)
    pictured["memory"]["visual_bits_per_element"] = 1.25
    rows = [line for line in evaluation_table([pictured, other]).splitlines() if "±" in line]
    assert [row.split("|")[2].strip() for row in rows[:2]] == ["2.50", "1.25"]


def test_report_prints_results_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(result("kivi", 2.5, anls=0.8)))
    done = CliRunner().invoke(app, ["report", "--results", ".", "--print"])
    assert done.exit_code == 0, done.output
    assert "| kivi | 2.50 | 0.800 ± 0.010 |" in done.stdout
