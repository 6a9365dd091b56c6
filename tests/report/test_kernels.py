"""Tables of made-up results."""

import copy

import pytest

from duotone.report.kernels import (
    kernel_speedups,
    kernel_table,
    packing_table,
)

from made_up import made_up

MAIN = "B 32, heads 32/8, n 8,192, d 128"


@pytest.fixture(scope="module")
def result():
    return made_up()


def test_a_wrong_row_shows_in_every_table(result):
    bad = copy.deepcopy(result)
    for row in bad["rows"]:
        if row["row"] == "1 bit":
            row |= {"status": "wrong", "reason": "relative RMS 0.5"}
    assert "- wrong, relative RMS 0.5: 1 bit (cuda), 1 bit (triton)" in kernel_table([bad])
    one_bit = next(x for x in kernel_speedups([bad]).splitlines() if x.startswith("| 1 bit |"))
    assert one_bit.count("wrong") == len(bad["shapes"])


def test_without_rotated_times_the_clean_ones_count(result):
    bad = copy.deepcopy(result)
    for row in bad["rows"]:
        for part in ("us", "tb_per_s", "share_of_copy", "speedup"):
            if part in row:
                row[part]["rotated"] = None
    assert kernel_table([bad])
    assert "- / " in kernel_speedups([bad])


def test_packing_is_compared_with_a_copy_and_hybrids_with_symmetric_groups(result):
    text = packing_table([result])
    assert "| 8, 8, 8,192 | innerq-2 symmetric | 120.0 | 1.20 | 33.6 |" in text
    assert "8, 8, 8,192: hybrid / symmetric 1.25" in text
    short = result | {"pack": result["pack"] | {"stopped": "no time", "rows": []}}
    assert "Larger shapes are missing: no time." in packing_table([short])
    assert "hybrid /" not in packing_table([short])
    before = {key: value for key, value in result.items() if key != "pack"}
    for other in (before, result | {"pack": {"status": "failed", "reason": "x"}}):
        assert packing_table([other]) == "Packing was not measured."
