import json

import pytest

from duotone.report import tables as report
from duotone.report.files import read_file

from made_up_results import result
from paths import REPOSITORY


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality/a.json").write_text(json.dumps(result()))
    (tmp_path / "quality/b.json").write_text(json.dumps(result("captions")))
    (tmp_path / "other.json").write_text("[1, 2]")
    return tmp_path


def test_tables_are_found_below_a_folder(folder):
    rendered = report.tables(folder)
    assert set(rendered) == {"quality", "quality-summary", "divergence", "tau-grids"}
    assert "documents, anls | captions (question asked later), anls |" in rendered["quality"]


def test_the_speedups_in_the_readme_are_those_of_the_kernels_file():
    home = REPOSITORY
    rows = json.loads((home / "results/kernels/h200.json").read_text())["rows"]
    shape = {"batch": 32, "q_heads": 32, "kv_heads": 8, "tokens": 8192, "head_dim": 128}
    found = {
        row["row"]: row["speedup"]
        for row in rows
        if row["shape"] == shape and row["impl"] == "cuda" and row["status"] == "ok"
    }
    one, tau, two = (found[name] for name in ("1 bit", "1 bit, tau", "2 bit"))
    readme = " ".join((home / "README.md").read_text().split())
    among = "{:.1f}x the fastest 16-bit attention at 1 bit, {:.1f}x with score calibration, {:.1f}x"
    alone = "a launch by itself {:.1f}x, {:.1f}x and {:.1f}x (32 sequences of 8,192 tokens"
    assert among.format(*(x["rotated"] for x in (one, tau, two))) + " at 2 bits" in readme
    assert alone.format(*(x["clean"] for x in (one, tau, two))) in readme


def test_the_throughput_in_the_readme_is_that_of_its_files():
    home = REPOSITORY
    speeds: dict[tuple, dict[str, float]] = {}
    paths = (home / "results/throughput").glob("*.jsonl")
    for measured in (one for path in paths for one in read_file(path)):
        at = measured["configuration"]
        key = (measured["model"]["name"], at["visual"], at["budget_bytes"])
        speeds.setdefault(key, {})[at["row"]] = measured["decode_tokens_per_s"]

    def ratios_of(*names: str) -> list[float]:
        found = (
            (row, speed / rows["16-bit"]) for rows in speeds.values() for row, speed in rows.items()
        )
        return [ratio for row, ratio in found if row in names]

    ratios = ratios_of("1-bit visual", "1-bit visual, 2-bit text")
    integer = ratios_of("1-bit visual, 2-bit text, W8A8")
    readme = " ".join((home / "README.md").read_text().split())
    assert f"decodes {min(ratios):.1f} to {max(ratios):.0f} times the tokens per second" in readme
    wanted = f"with W8A8 weights and KIVI's 2-bit stream {min(integer):.1f} to {max(integer):.0f}"
    assert f"{wanted} times" in readme
    ours, theirs = "1-bit visual, 2-bit text, W8A8", "16-bit, W8A8"
    both = [rows[ours] / rows[theirs] for rows in speeds.values()]
    assert f"W8A8 weights on both sides {min(both):.1f} to {max(both):.0f} times" in readme
