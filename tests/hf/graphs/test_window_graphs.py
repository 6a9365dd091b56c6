"""Decode graphs of models with windows that stay in 16 bit, on the double: as with windows that
grow, through prompts shorter and longer than a window.
"""

from typing import Any

import pytest
import torch
from graph_answers import NEW, answer, assert_same
from replay_double import ReplayDouble, double
from small_specs import STREAM

from duotone.hf import model_facts
from duotone.hf.cache.windows import RingPlaces

from families import HYBRIDS, exact_model, inputs

__all__ = ["double"]  # a fixture

NAMES = ("gemma3", "llama4", "gemma4", "gemma4_e2b", "gemma3n_text", "cohere2")
QUICK = ("gemma3", "llama4")  # a window, and chunks
FAMILIES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]
SLOW = pytest.mark.slow
LENGTHS = [pytest.param((40, 31), id="long"), pytest.param((17, 7), id="short", marks=SLOW)]
MODES = [{}, pytest.param({"do_sample": True}, marks=SLOW), {"num_beams": 3}]


def rows(name: str, lengths: tuple[int, ...]) -> list[list[Any]]:
    """Rows of so much text, the first one around a picture where the model takes one."""
    texts = [[n] for n in lengths]
    if name in HYBRIDS and not HYBRIDS[name].is_multimodal:
        return texts
    return [[3, "image", lengths[0]], *texts[1:]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_replays_are_the_eager_steps(
    double: type[ReplayDouble], name: str, lengths: tuple[int, ...], mode: dict
) -> None:
    if name == "llama4" and mode.get("num_beams"):
        pytest.skip("transformers repeats ids for beams, and not this model's pictures")
    model, given, outs = exact_model(name), inputs(name, rows(name, lengths)), []
    assert model_facts(model).windows
    for graphs in (True, False):
        torch.manual_seed(5)
        outs.append(answer(model, STREAM, given, graphs, **mode))
    assert_same(*outs)
    assert double.replays >= NEW - 2
    ours, theirs = (out.session.cache for out in outs)
    assert ours.timeline.frozen is not None
    ours.timeline.settle()
    assert ours.timeline.own.tensors.keys() == theirs.timeline.own.tensors.keys()
    for kind, x in ours.timeline.own.tensors.items():
        assert torch.allclose(x, theirs.timeline.own.tensors[kind], atol=1e-9), kind


def test_a_later_call_takes_a_capture_over_with_its_own_windows(double: type[ReplayDouble]) -> None:
    model = exact_model("gemma3")
    for seed, lengths in ((1, (40, 31)), (2, (9, 50))):
        given = inputs("gemma3", rows("gemma3", lengths), seed)
        ours = answer(model, STREAM, given)
        captures = double.captures
        assert_same(ours, answer(model, STREAM, given, graphs=False))
        del ours
    assert captures == 2  # of the step and of a flush, both of the first call


@pytest.mark.parametrize(
    ("is_chunked", "padding", "seen"),
    [(False, 2, [4, 5, 6, 7]), (False, 5, [5, 6, 7]), (True, 0, [4, 5, 6, 7]), (True, 2, [6, 7])],
)
def test_a_ring_knows_padding_and_chunks(is_chunked: bool, padding: int, seen: list[int]) -> None:
    """A window of 4 tokens after the eighth one; two of them are steps."""
    ring = RingPlaces(torch.arange(6).expand(1, 6) >= padding, 4, is_chunked)
    for _ in range(2):
        ring.advance()
    assert sorted(ring.places[ring.seen].tolist()) == seen
    assert ring.places[0, ring.slot].item() == ring.now.item() == 7
