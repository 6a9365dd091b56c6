"""A gain is chosen by the divergence on a few batches."""

from itertools import pairwise

import pytest

from duotone.calibrate import Settings, calibrate, calibration_data
from duotone.calibrate.gains import MEASURED, nearest, spread
from duotone.loading import Loaded
from duotone.tune.batches import ready
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def pictured():
    return Loaded("tiny", tiny_model(), TinyProcessor())


def test_the_nearest_spec_is_that_of_the_least_divergence(pictured):
    data = calibration_data(pictured, [TINY_TASK], 4, 2)
    bases, spec, _ = calibrate(pictured, data.batches, Settings(bits=2.0, foreground=None))
    value = spec.visual.value.replace(gain=8.0)
    far = spec.replace(visual=spec.visual.replace(value=value), layers=())
    near = spec.replace(layers=())
    for specs in ({"near": near, "far": far}, {"far": far, "near": near}):
        assert nearest(pictured.model, bases, specs, data.batches) == "near"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_batches_that_choose_a_gain_reach_from_the_first_to_the_last(count):
    chosen = spread(count, MEASURED)
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, count - 1, min(count, MEASURED))
    steps = [after - before for before, after in pairwise(chosen)]
    assert not steps or max(steps) - min(steps) <= 1


def test_the_last_batch_takes_part_in_the_choice_of_a_gain(pictured, monkeypatch):
    data = calibration_data(pictured, [TINY_TASK], 4, 1)
    bases, spec, _ = calibrate(pictured, data.batches, Settings(bits=2.0, foreground=None))
    seen = []

    def prepared(model, tensors, answer_tokens):
        seen.append(tensors)
        return ready(model, tensors, answer_tokens)

    monkeypatch.setattr("duotone.calibrate.gains.ready", prepared)
    nearest(pictured.model, bases, {"one": spec}, data.batches)
    numbers = [i for x in seen for i, b in enumerate(data.batches) if b.tensors is x]
    assert numbers == [0, 1, 3]
