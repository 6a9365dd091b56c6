"""Tables and pictures of made-up results."""

import copy
import json

import pytest

from duotone.report.kernels import (
    kernel_speedups,
    kernel_table,
    packing_table,
)
from duotone.report.plots import draw, speedup_points

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


def test_a_family_is_drawn_over_n(result):
    family = [s for s in result["shapes"] if (s["kv_heads"], s["head_dim"]) == (8, 128)]
    family = [s for s in family if s["q_heads"] == 32]
    points = speedup_points(result, family, "1 bit")
    assert [n for n, _ in points] == [3328, 8192, 32768, 131072]
    assert all(speedup > 5 for _, speedup in points)
    assert speedup_points(result, family, "nothing") == []


@pytest.mark.parametrize("form", ["png", "svg"])
def test_pictures(result, tmp_path, form):
    pytest.importorskip("matplotlib")
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(result))
    files = draw([path], tmp_path / "new", form)
    assert [file.name for file in files] == [f"h200-speedup.{form}"]
    assert all(file.stat().st_size > 10_000 for file in files)


def test_every_line_of_a_file_has_its_pictures(result, tmp_path):
    pytest.importorskip("matplotlib")
    both = tmp_path / "two.jsonl"
    both.write_text("\n".join([json.dumps(result)] * 2))
    names = ["two-1-speedup.svg", "two-2-speedup.svg"]
    assert [file.name for file in draw([both], tmp_path, "svg")] == names
    both.write_text(json.dumps(result) + "\n{}\n")
    with pytest.raises(ValueError, match="must be a result file"):
        draw([both], tmp_path)


def test_pictures_of_something_else_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.json"
    for text in ("{}", "[]", "no json", '{"schema": "duotone.quality/1"}'):
        other.write_text(text)
        with pytest.raises(ValueError, match="must be a result file"):
            draw([other], tmp_path)
    with pytest.raises(ValueError, match="--format"):
        draw([other], tmp_path, "gif")
