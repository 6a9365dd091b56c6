"""Cells that results of `duotone bench generate` may lack."""

import json
from typing import Any

import pytest

from duotone.report.generate import generate_summary, generate_table

from paths import REPOSITORY

RESULT = json.loads((REPOSITORY / "results/generate/h200-b1.json").read_text())
# Without what a file may lack.
FIRST = {
    row["row"]: {name: x for name, x in row.items() if not name.startswith("question")}
    for row in RESULT["rows"]
}
CACHED = next(name for name in FIRST if name.startswith("duotone"))


def row(name: str, ms: float, of: str = "plain", **more: Any) -> dict[str, Any]:
    """A published row with another name and other times."""
    return FIRST[of] | {"row": name, "ms_per_token": ms, "tokens_per_s": 1e3 / ms} | more


def result(batch: int = 1, **more: Any) -> dict[str, Any]:
    """This repository's own result with two rows, of other times and another batch."""
    load = RESULT["load"] | {"batch": batch}
    rows = [row("plain", 21.0), row("duotone@1", 7.0, of=CACHED, cache_bytes=29e6)]
    return RESULT | {"load": load, "rows": rows} | more


def test_what_a_cpu_cannot_measure_is_said() -> None:
    some = result(left_out=["peak_bytes", "graphs"])
    for each in some["rows"]:
        each["peak_bytes"] = None
    table = generate_table([some])
    with_the_prompt = round(FIRST[CACHED]["answer_tokens_per_s"])
    assert f"| 143 | 3.0 | {with_the_prompt} |  | 29.0 |" in table
    assert "Without a GPU nothing is captured" in table


def test_what_is_said_of_rows_and_of_a_load() -> None:
    some = result(weights="rtn-w4a8")
    some["load"]["padded"] = True
    some["rows"][1]["notes"] = ["decode runs slowly", "twice"]
    some["rows"] += [{"row": "hqq@4", "failed": False, "reason": "needs the package 'hqq'"}]
    table = generate_table([some])
    heads = "28/4 heads, weights rtn-w4a8"
    assert f"**internvl3-8b ({heads}), batch 1, 3,428 tokens, left-padded**" in table
    assert "*duotone@1*: decode runs slowly; twice.  \n*hqq@4*: needs the package 'hqq'." in table
    assert "| hqq@4" not in table


def test_the_summary_takes_the_faster_plain_row_and_the_preset() -> None:
    some = result()
    some["rows"] = [*some["rows"][::-1], row("plain, cuDNN off", 18.0)]
    assert "tokens, duotone@1 | 18.0 | 7.0 | 0.20 | 0.03 |" in generate_summary([some])


def test_the_summary_prefers_the_default_where_it_was_measured() -> None:
    some = result()
    of = {"of": CACHED, "cache_bytes": 29e6}
    some["rows"].insert(1, row("kivi@2", 6.0, **of))
    assert "tokens, duotone@1 | 21.0 | 7.0 |" in generate_summary([some])
    some["rows"].append(row("duotone-mixed@4", 8.0, **of))
    some["rows"].append(row("duotone-mixed@4, rtn-w4a8", 4.0, weights="rtn-w4a8", **of))
    assert "duotone-mixed@4 | 21.0 | 8.0 | 4.0 |" in generate_summary([some])
    failed = {"row": "duotone-mixed@4", "failed": True, "reason": "no memory"}
    some["rows"] = [*some["rows"][:-2], failed]
    assert "tokens, duotone@1 | 21.0 | 7.0 |" in generate_summary([some])


def test_a_load_without_both_sides_is_left_out_of_the_summary() -> None:
    alone = result(8)
    alone["rows"] = alone["rows"][:1]
    assert "batch 8" not in generate_summary([alone, result()])


def test_two_results_of_one_load_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got two of internvl3-8b .28/4 heads., batch 1"):
        generate_table([result(), result()])


def test_short_pictures_are_a_load_of_their_own() -> None:
    whole, short = result(), result()
    short["load"] = short["load"] | {"picture_tokens": 81}
    table = generate_table([whole, short])
    assert table.count(" in pictures of 81") == 1


def test_a_question_has_a_column_where_one_was_asked() -> None:
    asked = result()
    assert "question" not in generate_table([asked]).lower()
    asked["rows"][0]["question_ttft_ms"] = 61.7
    table = generate_table([asked])
    header = next(line for line in table.splitlines() if line.startswith("| row"))
    row = next(line for line in table.splitlines() if line.startswith("| plain |"))
    at = header.split(" | ").index("question, ms")
    assert row.split(" | ")[at] == "62"
    assert table.count("*Question*") == 1
