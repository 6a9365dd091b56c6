"""Cells that results of `duotone bench generate` may lack, and their picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duotone.cli import app
from duotone.report import plots
from duotone.report.generate import generate_summary, generate_table

from paths import REPOSITORY


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    """The first row of a result with another name and other times."""
    first = result()["rows"][0]
    return first | {"row": name, "ms_per_token": ms, "tokens_per_s": 1e3 / ms} | more


def result(batch: int = 1, **more: Any) -> dict[str, Any]:
    """This repository's own result, of another batch."""
    made = json.loads((REPOSITORY / "results/generate/h200-b1.json").read_text())
    made["load"]["batch"] = batch
    return made | more


def test_what_a_cpu_cannot_measure_is_said() -> None:
    some = result(left_out=["peak_bytes", "graphs"])
    for each in some["rows"]:
        each["peak_bytes"] = None
    table = generate_table([some])
    assert "| 143 | 3.0 |  |  | 29.0 |" in table
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


def test_a_load_without_both_sides_is_left_out_of_the_summary() -> None:
    alone = result(8)
    alone["rows"] = alone["rows"][:1]
    assert "batch 8" not in generate_summary([alone, result()])


def test_two_results_of_one_load_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got two of internvl3-8b .28/4 heads., batch 1"):
        generate_table([result(), result()])


def draw(tmp_path: Path, *results: dict[str, Any]) -> Any:
    paths = [tmp_path / f"{i}.json" for i in range(len(results))]
    for path, one in zip(paths, results, strict=True):
        path.write_text(json.dumps(one))
    arguments = ["bench", "plot", *map(str, paths), "--out", str(tmp_path), "--format", "svg"]
    return CliRunner().invoke(app, arguments)


def test_all_loads_are_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with_static = result(32)
    with_static["rows"].append(row("StaticCache, compiled", 7.7))
    done = draw(tmp_path, result(), with_static)
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.glob("*.svg")] == ["generate.svg"]


def test_a_picture_names_the_card_of_a_load_where_there_are_several() -> None:
    pytest.importorskip("matplotlib")
    for other in ("NVIDIA H100", result()["device"]):
        made = plots.generate([result(), result(32) | {"device": other}])
        ticks = [label.get_text() for label in made.axes[0].get_xticklabels()]
        assert [other in tick for tick in ticks] == [False, other == "NVIDIA H100"]


def test_a_picture_needs_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    alone = result()
    alone["rows"] = alone["rows"][:1]
    done = draw(tmp_path, alone)
    assert done.exit_code == 2
    assert "needs a plain row" in " ".join(done.output.split())


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"schema": "duotone.kernels/1"}'])
def test_pictures_of_something_else_are_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.json"
    other.write_text(text)
    with pytest.raises(ValueError, match="must be a result file of duotone bench generate"):
        plots.draw([other], tmp_path)
    with pytest.raises(ValueError, match="--format"):
        plots.draw([other], tmp_path, "gif")
