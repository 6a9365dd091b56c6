"""Decode graphs of models whose layers keep states, on the double: answers are the eager ones."""

import pytest
import torch
from graph_answers import NEW, answer, assert_same
from replay_double import ReplayDouble, double
from small_specs import STREAM

import duotone
from duotone import QuantizedCache
from duotone.hf import model_facts
from duotone.hf.cache.own_layers import OwnLayers
from duotone.hf.graphs import decode_steps

from exactly import rounding_as
from families import HYBRIDS, config_of, exact_model, inputs, new_model, typed

__all__ = ["double"]  # a fixture

DENSE = duotone.scheme("dense")
EXACT = ("qwen3_5", "lfm2", "lfm2_vl", "bamba")  # float64 throughout; others cannot


def _has_states(name: str) -> bool:
    try:
        return bool(model_facts(config_of(name)).states)
    except pytest.skip.Exception:  # none of this transformers: its tests say so
        return True


# One per kind of state in the default tier.
FAMILIES = [
    pytest.param(name, marks=() if name in ("qwen3_5", "lfm2") else pytest.mark.slow)
    for name in filter(_has_states, HYBRIDS)
]


def given_of(name: str) -> dict[str, torch.Tensor]:
    has_pictures = HYBRIDS[name].is_multimodal
    return inputs(name, [[3, "image", 9] if has_pictures else [17], [7]])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "mode", [{}, {"do_sample": True}, {"num_beams": 3, "output_logits": False}], ids=str
)
def test_replays_are_the_eager_steps(double: type[ReplayDouble], name: str, mode: dict) -> None:
    model, spec = (exact_model(name), STREAM) if name in EXACT else (new_model(name), DENSE)
    given, outs = given_of(name), []
    for graphs in (True, False):
        torch.manual_seed(5)
        outs.append(answer(model, spec, given, graphs, **mode))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert double.replays >= NEW - 2
    _assert_states(*(out.session.cache.timeline.own for out in outs))


def _assert_states(ours: OwnLayers, theirs: OwnLayers) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, x in ours.tensors.items():
        assert torch.allclose(x, theirs.tensors[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
def test_a_later_call_takes_a_capture_over_with_its_own_states(double: type[ReplayDouble]) -> None:
    model = exact_model("qwen3_5")
    for seed in (1, 2):
        given = inputs("qwen3_5", [[3, "image", 9], [7]], seed)
        ours = answer(model, STREAM, given)
        captures = double.captures
        theirs = answer(model, STREAM, given, graphs=False)
        assert_same(ours, theirs)
        _assert_states(*(out.session.cache.timeline.own for out in (ours, theirs)))
        del ours
    assert captures == 2  # one of the step, one of a flush, both of the first call


@pytest.mark.slow
def test_a_later_turn_goes_on_from_the_states(double: type[ReplayDouble]) -> None:
    model, given, outs = exact_model("qwen3_5"), given_of("qwen3_5"), []
    for graphs in (True, False):
        first = answer(model, STREAM, given, graphs)
        cache = first.session.cache
        cache._hold(cache._attachment.acquire())  # its block has ended
        ids = torch.cat([first.sequences, torch.arange(12).view(2, 6) + 20], 1)
        more = ids.new_ones(2, ids.shape[1] - given["input_ids"].shape[1])
        turn = {"input_ids": ids, "attention_mask": torch.cat([given["attention_mask"], more], 1)}
        outs.append(answer(model, STREAM, turn, graphs, past_key_values=cache))
    assert_same(*outs)
    assert double.replays >= 2 * (NEW - 2)


def test_a_capture_that_breaks_off_leaves_states_whole(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(double):
        def __init__(self, body, device) -> None:
            super().__init__(body, device)
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decode_steps, "capture", Breaks)
    model, given = exact_model("qwen3_5"), given_of("qwen3_5")
    assert_same(answer(model, STREAM, given), answer(model, STREAM, given, graphs=False))
    assert not double.replays


def test_states_that_record_their_past_do_not_freeze() -> None:
    model, given = exact_model("lfm2"), given_of("lfm2")
    cache = QuantizedCache(model, STREAM)
    with torch.no_grad(), rounding_as(model.dtype):
        model(**typed(model, given), past_key_values=cache)
        frozen_bytes = cache.memory().state_bytes
        cache.activate_past_recording()
        with pytest.raises(ValueError, match="record their past"):
            cache.timeline.hold_still(8)
        for layer in cache.timeline.own.states.values():
            layer.record_past = False
        cache.timeline.hold_still(8)
        assert cache.memory().state_bytes == frozen_bytes > 0
