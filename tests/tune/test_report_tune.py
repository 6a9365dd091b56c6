"""The report's tables, comparisons and plot from hand-made numbers."""

import json

import numpy as np
import pytest

from duotone.report import plots
from duotone.report import tune as tables
from duotone.tune.bits import Held
from duotone.tune.heldout import entry
from duotone.tune.objective import Measured
from duotone.tune.report import _scored, comparisons
from duotone.tune.settings import TuneSettings, check_resumable, remember

from paths import REPOSITORY


def interval(value):
    return {"value": value, "low": value * 0.5, "high": value * 1.5}


def numbers(bits, kl):
    task = {"kl": interval(kl), "same_top_token": interval(0.9), "kl_minus_chosen": interval(0.1)}
    return {"bits": bits, "bytes_per_sequence": 100 * bits, "kl": kl, "tasks": {"documents": task}}


HELD_OUT = {
    "calibquant @1": numbers(1.08, 0.4),
    "minmax @4": numbers(4.0, 0.001),
    "kivi @1": numbers(0.5, 0.3),
    "duotone @1": numbers(1.27, 0.02),
    "chosen": numbers(1.2, 0.01),
    "front 1": numbers(1.0, 0.05),
    "front 2": numbers(3.0, 0.002),
}


def made():
    """This repository's own report, with other held-out numbers."""
    own = json.loads((REPOSITORY / "results/tune/duotone-tiny/report.json").read_text())
    scores = {"documents": {"headline": "anls", "schemes": {"chosen": {"anls": interval(0.8)}}}}
    own["sensitivity"] = {"key": [0.3, 0.1], "value": [0.2, 0.05], "baseline": 0.001}
    own["published"] = ["calibquant @1", "minmax @4", "kivi @1"]
    return own | {"heldout": HELD_OUT, "comparisons": comparisons(HELD_OUT), "scores": scores}


def test_answers_are_generated_by_the_chosen_ours_and_the_best_published_near_it():
    assert _scored(HELD_OUT, 1.3) == ["chosen", "duotone @1", "kivi @1", "calibquant @1"]
    assert _scored({"chosen": HELD_OUT["chosen"]}, 1.3) == ["chosen"]


def test_a_spec_is_compared_with_the_chosen_one_where_there_is_one():
    rows = np.array([[0.2, 1.0, 2.0], [0.4, 2.0, 2.0]])
    worse, chosen = ({"a": Measured(k * rows, Held(300.0, 400, 2))} for k in (2.0, 1.0))
    (alone,), (beside,) = (entry(worse, *more)["tasks"].values() for more in ((), (chosen,)))
    assert beside.pop("kl_minus_chosen")["value"] == pytest.approx(0.0)
    assert beside == alone


def test_tables_say_who_is_not_beaten():
    text = tables.tune_comparisons([made()])
    assert "| calibquant @1 | 1.08 | 0.4 | 1.00 | 0.05 | 8.0x |" in text
    assert "| minmax @4 | 4.00 | 0.001 | 3.00 | 0.002 | **0.50x** |" in text
    assert "none of so few bits" in text


def test_the_page_has_every_table_and_the_plot():
    page = tables.tune_page(made(), "front.png")
    assert "![front](front.png)" in page
    assert "| **chosen** | 1.20 | 0.01 |" in page
    assert "| chosen | 0.800 ± 0.400 |" in page
    assert "| 0 | 0.3 | 0.2 |" in page
    assert "front" not in tables.tune_page(made() | {"heldout": {"chosen": HELD_OUT["chosen"]}})


def test_the_plot_names_published_schemes(tmp_path):
    pytest.importorskip("matplotlib")
    plots.front(made()).savefig(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    near = {"a": numbers(2.0, 0.1), "b": numbers(2.01, 0.11), "c": numbers(2.0, 0.9)}
    assert plots.by_place(near, ["a", "b", "c"]) == {(2.0, 0.1): ["a", "b"], (2.0, 0.9): ["c"]}


def test_a_folder_is_resumed_with_its_own_settings_only(tmp_path):
    out = tmp_path / "out"
    settings = TuneSettings(budget_bits=1.3).to_dict()
    assert not check_resumable(out, settings)
    remember(out, settings)
    assert check_resumable(out, settings)
    with pytest.raises(ValueError, match=r"budget_bits: 1.3 -> 2.0"):
        check_resumable(out, settings | {"budget_bits": 2.0})


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"seed": 0, "seed": 1}', "[" * 10**5, "\xff"])
def test_damaged_settings_are_named(tmp_path, text):
    remember(tmp_path / "out", TuneSettings(budget_bits=1.3).to_dict())
    (tmp_path / "out/settings.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"got '.*settings\.json', which is damaged. Delete it"):
        check_resumable(tmp_path / "out", TuneSettings(budget_bits=1.3).to_dict())


@pytest.mark.parametrize(
    "wrong", [{"ceiling": 0.5}, {"batch_size": 0}, {"sampler": "grid"}, {"bits_of": "text"}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TuneSettings(budget_bits=1.3, **wrong)
