"""Cells of tables that this repository's own results lack."""

import copy
import json

import pytest

from duotone.report.kernels import kernel_speedups, kernel_table, packing_table

from paths import REPOSITORY

KERNELS = REPOSITORY / "results/kernels"


@pytest.fixture(scope="module")
def result():
    return json.loads((KERNELS / "h200.json").read_text())


def test_a_wrong_row_shows_in_every_table(result):
    bad = copy.deepcopy(result)
    for row in bad["rows"]:
        if row["row"] in ("1 bit", "2 bit"):
            row |= {"status": "wrong", "reason": "relative RMS 0.5"}
    assert "- wrong, relative RMS 0.5: 1 bit (cuda), 2 bit (cuda)" in kernel_table([bad])
    one_bit = next(x for x in kernel_speedups([bad]).splitlines() if x.startswith("| 1 bit |"))
    assert one_bit.count("wrong") == len(bad["shapes"])


def test_speedups_are_those_of_the_faster_implementation(result):
    ours = [row for row in result["rows"] if row["impl"] and row["status"] == "ok"]
    slower = [
        row | {"impl": "triton", "us": {name: 2 * us for name, us in row["us"].items()}}
        for row in ours
    ]
    both = result | {"rows": slower + result["rows"]}
    assert "(cuda)" in kernel_speedups([both])
    assert "(triton)" not in kernel_speedups([both])


def test_without_rotated_times_the_clean_ones_count(result):
    bad = copy.deepcopy(result)
    for row in bad["rows"]:
        for part in ("us", "tb_per_s", "share_of_copy", "speedup"):
            if part in row:
                row[part]["rotated"] = None
    assert kernel_table([bad])
    assert "- / " in kernel_speedups([bad])


def test_packing_that_was_cut_off_or_not_measured_says_so():
    whole = json.loads((KERNELS / "packing.json").read_text())
    rows = [row for row in whole["pack"]["rows"] if row["row"] != "innerq-2 hybrid"]
    short = whole | {"pack": whole["pack"] | {"stopped": "no time", "rows": rows}}
    assert "Larger shapes are missing: no time." in packing_table([short])
    assert "hybrid / symmetric" not in packing_table([short])
    for other in (whole | {"pack": None}, whole | {"pack": {"status": "failed", "reason": "x"}}):
        assert packing_table([other]) == "Packing was not measured."
