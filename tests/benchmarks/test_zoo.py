"""KL on models of the zoo, on fresh weights of one: exact codes lose nothing, one bit does."""

from dataclasses import replace

import duotone
from benchmarks.quality.zoo import Conversation, measure, specs
from training.zoo.members import MEMBERS
from training.zoo.train import HELD_OUT, Feed


def test_codes_are_read_by_the_answers() -> None:
    member = MEMBERS["llava"]
    batch = Feed("cpu", HELD_OUT, 1).next(replace(member.shapes[0], rows=4))
    batch.pixels = batch.pixels.double()  # sums of float32 alone pass the bound on some CPUs
    rows = {"exact": duotone.scheme("dense"), "one bit": specs(1)["min/max@1"]}
    plain, exact, coarse = measure(Conversation(member.build().double().eval(), batch), rows)
    assert exact["kl"] < 1e-9 < coarse["kl"]
    assert plain["accuracy"] == exact["accuracy"]
    assert (exact["visual_bits"], 1 < coarse["visual_bits"] < 2) == (64, True)
