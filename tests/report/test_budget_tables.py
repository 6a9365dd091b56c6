"""Cells that results of `duotone bench generate --budget` lack; `test_pages.py` has the rest."""

import pytest

from duotone.report.budget import budget_summary, budget_table

from made_up_results import HEADER


def row(name: str, batch: int, step_ms: float, **more: object) -> dict:
    speeds = {"tokens_per_s": 1e3 * batch / step_ms, "answer_tokens_per_s": 500 * batch / step_ms}
    times = {"step_ms": step_ms, "read_s": 0.125, "peak_bytes": 4_500_000_000, "notes": []}
    return {"row": name, "batch": batch, "largest_batch": batch, **times, **speeds, **more}


def result(budget: float = 5e9, **more: object) -> dict:
    rows = [row("plain", 8, 20.0), row("duotone@1", 40, 10.0), row("plain, rtn-w8a8", 8, 16.0)]
    return {
        **HEADER,
        "schema": "duotone.generate-budget/1",
        "model": "internvl2.5-8b",
        "visual_tokens": 3328,
        "prompt_tokens": 128,
        "new_tokens": 500,
        "budget_bytes": int(budget),
        "q_heads": 32,
        "kv_heads": 8,
        "rows": rows,
        **more,
    }


def cells(table: str, row: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    return [line for line in lines if line[1].strip() == row]


def test_the_faster_plain_row_is_the_measure() -> None:
    rows = [row("plain", 8, 20.0), row("plain, cuDNN off", 8, 10.0), row("duotone@1", 40, 10.0)]
    table = budget_table([result(rows=rows)])
    assert [cells(table, one["row"])[0][5] for one in rows] == ["0.5", "1.0", "5.0"]
    assert "- `duotone@1`: 5.0 to 5.0 x plain in steps" in budget_summary([result(rows=rows)])
    alone = budget_table([result(rows=rows[2:])])
    assert cells(alone, "duotone@1")[0][5] == ""


def test_what_does_not_fit_or_run_is_said() -> None:
    reason = {"row": "nope@1", "failed": True, "reason": "ValueError: no"}
    rows = [{"row": "plain", "batch": 0}, row("kivi@2", 2, 5.0, notes=["slow"]), reason]
    table = budget_table([result(rows=rows), result(10e9, rows=[reason])])
    assert "| 5 | plain | 0 |" in table
    assert "*kivi@2* (5 GB): slow." in table
    assert "*nope@1* (5, 10 GB): ValueError: no." in table
    assert "*kivi@2* (10 GB): not measured yet." in table


def test_commits_of_later_rows_are_named() -> None:
    later = row("duotone@1", 40, 10.0, commit="f" * 40, created="2031-02-03T00:00:00+00:00")
    given = [result(rows=[row("plain", 8, 20.0), later])]
    for render in (budget_table, budget_summary):
        (said,) = (line for line in render(given).splitlines() if "commit" in line)
        assert f"commit {HEADER['commit'][:10]}, ffffffffff; 2031-02-03" in said


def test_two_results_of_a_budget_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 GB\. Remove one"):
        budget_table([result(), result()])
