"""The end of a search: who is kept, by made-up measurements."""

import json

import numpy as np
import pytest

import duotone
from duotone.tune.bits import Held
from duotone.tune.objective import Measured
from duotone.tune.packed import Packed
from duotone.tune.verdict import verdict

SAMPLES = 12
VISUAL, STREAM = duotone.scheme("duotone-whole"), duotone.scheme("kivi")
SPECS = {
    "found": VISUAL,
    "calibquant @1": duotone.scheme("calibquant"),
    "duotone @1": duotone.scheme("duotone"),
    "kivi @2": STREAM,
}
SHARED = np.random.default_rng(0).uniform(0.5, 1.5, SAMPLES)
SHARED /= SHARED.mean()


def measured(kl, bits, packed=None, samples=SAMPLES, counted=4.0, noise=0.0):
    draws = np.random.default_rng(1).normal(0, noise, samples) if noise else np.zeros(samples)
    sums = counted * kl * (SHARED[:samples] + draws).clip(1e-6)
    rows = np.stack([sums, np.full(samples, counted), np.full(samples, counted)], 1)
    held = Held(bits * samples * 100 / 8, samples * 100, samples)
    return Measured(rows, held, packed or Packed(samples * 100, samples * 80, samples * 10))


def compared(**numbers):
    """{label with spaces as "_": (kl, bits, more)} -> verdict on two equal tasks."""
    rows = {label: dict.fromkeys(("a", "b"), measured(*given)) for label, given in numbers.items()}
    return verdict("found", SPECS, rows, [name for name in SPECS if name != "found"])


def test_a_preset_of_no_more_bits_that_is_nearer_takes_the_place():
    end = compared(**{"found": (0.1, 1.2), "calibquant @1": (0.04, 1.1)})
    assert (end.kept, end.is_better, end.is_settled) == ("calibquant @1", False, True)
    assert end.ratio.value == pytest.approx(2.5, rel=1e-3)
    said = end.sentences()[0]
    assert "found: KL 0.1 at 1.20 bits; calibquant @1, a preset: KL 0.04 at 1.10 bits" in said
    assert said.endswith("calibquant @1 is better and takes its place.")


def test_the_nearest_preset_within_the_bits_is_the_rival():
    numbers = {"calibquant @1": (0.2, 1.1), "duotone @1": (0.05, 1.3)}
    end = compared(found=(0.1, 1.2), **numbers)
    assert (end.kept, end.rival.label) == ("found", "calibquant @1")
    assert "found is better and is kept" in end.sentences()[0]
    assert end.sentences()[1] == "duotone @1 is nearer at more bits: KL 0.05 at 1.30."
    assert compared(found=(0.1, 1.31), **numbers).kept == "duotone @1"
    assert len(compared(found=(0.1, 1.0), **numbers).sentences()) == 2  # 1.3 are no little more


def test_a_budget_may_be_larger_than_what_was_found():
    rows = {"found": {"a": measured(0.1, 1.0)}, "calibquant @1": {"a": measured(0.05, 1.2)}}
    assert verdict("found", SPECS, rows, ["calibquant @1"]).rival is None
    assert verdict("found", SPECS, rows, ["calibquant @1"], limit=1.3).kept == "calibquant @1"
    end = verdict("found", SPECS, rows, ["calibquant @1"], limit=1.3, asked=True)
    assert (end.kept, end.to_dict()["better"]) == ("found", "calibquant @1")
    assert "found is kept, as was asked" in end.sentences()[0]


def test_noise_is_said_and_few_samples_settle_nothing():
    rows = {
        "found": {"a": measured(0.1, 1.2)},
        "calibquant @1": {"a": measured(0.1, 1.1, noise=0.5)},
    }
    end = verdict("found", SPECS, rows, ["calibquant @1"])
    assert end.ratio.low < 1 < end.ratio.high
    assert "which the samples do not settle" in end.sentences()[0]
    few = {
        label: {"a": measured(kl, 1.1, samples=2)}
        for label, kl in (("found", 0.1), ("calibquant @1", 0.2))
    }
    assert not verdict("found", SPECS, few, ["calibquant @1"]).is_settled


def test_equal_specs_are_no_rivals_and_equal_numbers_change_nothing():
    end = compared(**{"found": (0.1, 1.2), "calibquant @1": (0.1, 1.2)})
    assert end.kept == "found"
    assert "found is as near and is kept" in end.sentences()[0]
    rows = {name: {"a": measured(0.1, 1.2)} for name in ("found", "duotone @1")}
    end = verdict("found", SPECS | {"duotone @1": VISUAL}, rows, ["duotone @1"])
    assert end.rival is None
    assert "No preset takes 1.20 true bits or less here" in end.sentences()[0]


def test_presets_that_were_given_up_are_named():
    rows = {"found": {"a": measured(0.1, 1.2)}}
    end = verdict("found", SPECS, rows, ["calibquant @1", "kivi @2"])
    assert (end.kept, end.rival, end.given_up) == ("found", None, ("calibquant @1", "kivi @2"))
    assert "tenfold further away (calibquant @1, kivi @2): found stays" in end.sentences()[0]
    assert end.to_dict()["given_up"] == ["calibquant @1", "kivi @2"]


def test_a_stream_that_was_never_packed_is_no_rival():
    never = Packed(SAMPLES * 100, sequences=SAMPLES)
    rows = {"found": {"a": measured(0.1, 1.2)}, "kivi @2": {"a": measured(0.0, 1.0, never)}}
    end = verdict("found", SPECS, rows, ["kivi @2"])
    assert (end.kept, end.rival) == ("found", None)
    assert "no token of its text codes was packed" in end.others[0].why


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (measured(0.0, 1.2, Packed(1200, sequences=12)), "no token of its visual codes was packed"),
        (measured(0.0, 1.2, counted=0.0), "no token of an answer of 'a' was compared"),
    ],
)
def test_a_spec_that_nothing_was_measured_of_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        verdict("found", SPECS, {"found": {"a": rows}}, ())


def test_the_last_sentence_says_what_is_packed():
    end = compared(found=(0.1, 1.2))
    assert end.sentences()[-1].startswith("found packs 90 % of the tokens")
    assert json.loads(json.dumps(end.to_dict()))["found"]["packed"] == pytest.approx(0.9)
