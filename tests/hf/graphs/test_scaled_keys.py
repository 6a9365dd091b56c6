"""Captured decode steps read the scales of the cache that they replay, not of an earlier one."""

from typing import Any

import pytest
import torch
from replay_double import ReplayDouble, double, growing
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.attentions import attentions
from duotone.hf.model.facts import model_facts

from exactly import rounding_as
from families import inputs, new_exact_model, typed

__all__ = ["double"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:K that has channels far larger")
FOUR = TensorSpec(4, "channels", 8)
SPEC = CacheSpec(visual=KVSpec(FOUR, FOUR), text=KVSpec(FOUR, FOUR), sink=2, recent=3)
NEW = 8


@torch.no_grad()
def grow(model: PreTrainedModel, channels: list[int], factor: float) -> None:
    """Let keys grow and queries shrink in place: a capture of the model stays as it is."""
    for attention in attentions(model, model_facts(model)):
        for name, by in (("k", factor), ("q", 1 / factor)):
            linear = getattr(attention, f"{name}_proj")
            for tensor in (linear.weight, linear.bias):
                rows = tensor.unflatten(0, (-1, attention.head_dim))
                rows[:, channels] = rows[:, channels] * by
                tensor.mul_(1)


def asked(model: PreTrainedModel, **more: Any) -> Tensor:
    prompt = typed(model, inputs("internvl", [[5, "image", 9], [4]]))
    call = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, **more}
    with rounding_as(model.dtype), duotone.enable(model, SPEC) as session:
        out = model.generate(**prompt, return_dict_in_generate=True, **call)
    assert None not in session.cache.timeline.scales.each
    return torch.stack(out.logits)


def test_a_capture_reads_the_scales_of_its_cache_of_now(double: type[ReplayDouble]) -> None:
    model = new_exact_model("internvl")
    grow(model, [3, 11], 8.0)
    earlier = QuantizedCache(model, SPEC).timeline.scales
    asked(model)
    before = earlier.copied()
    for channels in ([1, 9], [2, 10]):
        grow(model, channels, 8.0)
        with growing():
            expected = asked(model)
        torch.testing.assert_close(asked(model), expected, rtol=1e-9, atol=1e-9)
    assert double.captures == 2  # the model's step and the flush, in the first round
    assert double.replays >= 3 * (NEW - 2)
    # What a live cache of earlier weights reads.
    assert all(map(torch.equal, earlier.each, before.each))


def test_rows_of_a_capture_keep_their_scales(double: type[ReplayDouble]) -> None:
    model = new_exact_model("internvl")
    grow(model, [1, 9], 8.0)
    beams = {"num_beams": 3}
    with growing():
        expected = asked(model, **beams)
    for _ in range(2):
        torch.testing.assert_close(asked(model, **beams), expected, rtol=1e-9, atol=1e-9)
    assert double.captures == 2
