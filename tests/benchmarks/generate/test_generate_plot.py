"""The picture of results of `duotone bench generate`."""

import json
import sys
from typing import Any

import pytest

from benchmarks.generate import plot

from paths import REPOSITORY


def result(batch: int = 1, **more: Any) -> dict[str, Any]:
    """This repository's own result, of another batch."""
    made = json.loads((REPOSITORY / "results/generate/h200-b1.json").read_text())
    made["load"]["batch"] = batch
    return made | more


def test_all_loads_are_one_picture(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["plot", "--out", str(tmp_path / "img")])
    plot.main()
    assert [path.name for path in (tmp_path / "img").iterdir()] == ["generate.png"]


def test_a_picture_names_the_card_of_a_load_where_there_are_several() -> None:
    pytest.importorskip("matplotlib")
    for other in ("NVIDIA H100", result()["device"]):
        made = plot.generate([result(), result(32) | {"device": other}])
        ticks = [label.get_text() for label in made.axes[0].get_xticklabels()]
        assert [other in tick for tick in ticks] == [False, other == "NVIDIA H100"]


def test_a_picture_needs_both_sides() -> None:
    alone = result()
    alone["rows"] = alone["rows"][:1]
    with pytest.raises(ValueError, match="needs a plain row"):
        plot.generate([alone])
