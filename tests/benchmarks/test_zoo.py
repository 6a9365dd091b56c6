"""KL on models of the zoo, on fresh weights of one: exact codes lose nothing, one bit does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import duotone
from benchmarks.quality.bounds import span_bits
from benchmarks.quality.zoo import (
    CALIBRATION,
    Conversation,
    calibrated,
    candidates,
    measure,
    ratio,
    rivals,
    specs,
)
from duotone import LayerRule
from training.zoo.members import MEMBERS
from training.zoo.train import HELD_OUT, Feed

# Heads of 64 channels: a range per token costs half a bit, a norm a quarter, and a group of 32 one.
BITS_OF_RIVALS = {
    "oscar-rotation, calibrated@2": 2.5,
    "oscar-rotation@2": 2.5,
    "turboquant K3 V3": 3.375,
    "kivi@2": 3.07,
    "kivi, jensen@2": 3.07,
}


def test_codes_are_read_by_the_answers() -> None:
    member = MEMBERS["llava"]
    feed = Feed("cpu", HELD_OUT, 1)
    batches = [feed.next(replace(member.shapes[0], rows=2)) for _ in range(2)]
    for batch in batches:
        batch.pixels = batch.pixels.double()  # sums of float32 alone pass the bound on some CPUs
    rows = {"exact": duotone.scheme("dense"), "one bit": specs(1)["min/max@1"]}
    rows["parts"] = candidates(1)["parts, finer, .37 and .12@1"]
    model = member.build().double().eval()
    plain, exact, coarse, parts = measure([Conversation(model, batch) for batch in batches], rows)
    assert exact["kl"] < 1e-9 < coarse["kl"]
    assert plain["accuracy"] == exact["accuracy"]
    assert (exact["visual_bits"], 1 < coarse["visual_bits"] < 2) == (64, True)
    # The cache counts its index, too.
    assert 0 < parts["visual_bits"] - span_bits(rows["parts"], 49, 64, 8) < 0.02
    counts = [int((batch.labels != -100)[row].sum()) for batch in batches for row in range(2)]
    assert plain["tokens"] == counts
    assert sum(coarse["kl_sums"]) / sum(counts) == pytest.approx(coarse["kl"], rel=1e-3)


def test_rivals_are_read_by_the_answers_at_their_bits(tmp_path: Path) -> None:
    member, every = MEMBERS["qwen3-vl"], rivals()
    model, shape = member.build().eval(), replace(member.shapes[0], rows=1)
    held_out, other = (Feed("cpu", seed, 1).next(shape) for seed in (HELD_OUT, CALIBRATION))
    rows = calibrated(model, [other], tmp_path / "rotations.safetensors")
    rows |= {name: every[name] for name in BITS_OF_RIVALS if name in every}
    assert list(rows) == list(BITS_OF_RIVALS)
    _, *found = measure([Conversation(model, held_out)], rows)
    for row in found:
        assert 0 < row["kl"] < 1
        assert row["visual_bits"] == pytest.approx(BITS_OF_RIVALS[row["row"]], abs=0.04)
    plain, corrected = found[-2:]
    assert plain["visual_bits"] == corrected["visual_bits"]
    assert plain["kl"] != corrected["kl"]
    assert all(spec.scale_keys == "never" for name, spec in every.items() if "kvarn" in name)


def test_time_ends_batches_and_not_rows() -> None:
    """One batch is measured whole even where there is no time, and where a row fails."""
    member = MEMBERS["llava"]
    batch = Feed("cpu", HELD_OUT, 1).next(replace(member.shapes[0], rows=1))
    talk = Conversation(member.build().eval(), batch)
    plain = specs(1)["min/max@1"]
    too_deep = plain.replace(layers=(LayerRule(90, visual=plain.visual),))
    rows = {"too deep": too_deep, "exact": duotone.scheme("dense")}
    first, refused, exact = measure([talk] * 3, rows, seconds=0)
    assert (len(first["tokens"]), len(exact["kl_sums"])) == (1, 1)
    assert refused["failed"].startswith("ValueError: rules must lie within 8 layers")


def test_intervals_are_over_sequences() -> None:
    """One sequence that has all of a KL makes the interval about twice the mean."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.full((64,), 5.0)
    mean, interval = ratio(torch.eye(64)[0], counts)
    assert mean == pytest.approx(1 / 320)
    assert interval == pytest.approx(1.96 * mean, rel=0.02)
    sums = 1 + torch.rand(64, generator=draw)
    mean, interval = ratio(sums, counts)
    assert interval == pytest.approx(1.96 * float(sums.std()) / 8 / 5, rel=0.02)
