"""Captures of one `generate` call serve later calls, and nobody's tokens are overwritten."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_double import ReplayDouble, double, growing
from small_specs import MIXED
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, QuantizedCache
from duotone.hf.graphs import decode_steps, kept_steps
from duotone.hf.session import Session

from exactly import rounding_as
from families import exact_model, inputs, new_model, typed

__all__ = ["double"]  # a fixture

NEW = 14
ROWS = {"short": [[5, "image", 9], [4]], "long": [[2, "image", 3, "image", 40], [30, "image", 9]]}


def asked(model: PreTrainedModel, prompt: dict[str, Tensor], **more: Any) -> Tensor:
    call = {"max_new_tokens": NEW, "do_sample": False, **more}
    return model.generate(**typed(model, prompt), **call)


def prompt_of(rows: list, seed: int = 0) -> dict[str, Tensor]:
    return inputs("internvl", rows, seed=seed)


def expected(model: PreTrainedModel, spec: CacheSpec, prompt: dict[str, Tensor]) -> Tensor:
    with rounding_as(model.dtype), growing(), duotone.enable(model, spec):
        return asked(model, prompt)


def test_ten_calls_are_captured_once_and_hold_no_more_than_one(double: type[ReplayDouble]) -> None:
    """Prompts have other tokens and other lengths, and so flush at other steps."""
    model = exact_model("internvl")
    prompts = [prompt_of([[5 + n, "image", 9], [4]], seed=n) for n in range(3)]
    answers = [expected(model, MIXED, prompt) for prompt in prompts]
    held = set()
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        for call in range(10):
            assert torch.equal(asked(model, prompts[call % 3]), answers[call % 3])
            held.add(session.graph_bytes())
            if call == 0:
                first, replays = double.captures, double.replays
    assert double.captures == first == 2  # the model's step and the flush
    assert double.replays >= replays + 9 * (NEW - 1)
    assert len(held) == 1
    assert held.pop() > session.cache.memory().total_bytes


def test_batch_sizes_in_turn_and_answers_of_other_lengths_are_captured_once(
    double: type[ReplayDouble],
) -> None:
    model = exact_model("internvl")
    prompts = [prompt_of(ROWS["short"]), prompt_of(ROWS["short"] + [[7]])]
    answers = [expected(model, MIXED, prompt) for prompt in prompts]
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        for call in range(4):
            assert torch.equal(asked(model, prompts[call % 2]), answers[call % 2])
        held = session.graph_bytes()
        for new in (NEW - 5, NEW - 2):
            answer = asked(model, prompts[0], max_new_tokens=new)
            assert torch.equal(answer, answers[0][:, : answer.shape[1]])
        assert session.graph_bytes() == held
    assert double.captures == 2 * 2


def test_a_later_block_of_an_equal_spec_replays_what_an_earlier_one_captured(
    double: type[ReplayDouble],
) -> None:
    model, prompt = exact_model("internvl"), prompt_of(ROWS["short"])
    answer = expected(model, MIXED, prompt)
    for _ in range(3):
        with rounding_as(model.dtype), duotone.enable(model, MIXED.replace()):
            assert torch.equal(asked(model, prompt), answer)
    assert double.captures == 2


def test_prompts_of_another_layout_are_captured_at_their_first_step(
    double: type[ReplayDouble],
) -> None:
    model = exact_model("internvl")
    prompts = [prompt_of(ROWS["short"]), prompt_of(ROWS["long"])]
    answers = [expected(model, MIXED, prompt) for prompt in prompts]
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        for prompt, answer in zip(prompts, answers, strict=True):
            before = double.replays
            assert torch.equal(asked(model, prompt), answer)
            steps = NEW - 1 if prompt is prompts[1] else NEW - 2
            assert double.replays - before >= steps
        # Either one is there for its next prompt.
        captures = double.captures
        for prompt, answer in zip(prompts, answers, strict=True):
            assert torch.equal(asked(model, prompt), answer)
        assert double.captures == captures
        assert session.graph_bytes()


def test_a_hope_that_fails_costs_one_step(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, failures = exact_model("internvl"), []
    prompts = [prompt_of(ROWS["short"]), prompt_of(ROWS["long"])]
    answers = [expected(model, MIXED, prompt) for prompt in prompts]

    def refuse_once(body: Callable, device: torch.device) -> ReplayDouble:
        if double.captures >= 2 and not failures:
            failures.append(body)
            raise RuntimeError("operation not permitted when stream is capturing")
        return double(body, device)

    monkeypatch.setattr(decode_steps, "capture", refuse_once)
    with rounding_as(model.dtype), duotone.enable(model, MIXED):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert torch.equal(asked(model, prompt), answer)
    assert failures
    assert double.captures == 4


def test_a_cache_that_lives_keeps_its_tokens(double: type[ReplayDouble]) -> None:
    model = exact_model("internvl")
    prompts = [prompt_of(ROWS["short"], seed=n) for n in range(2)]
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        first = asked(model, prompts[0])
        held = session.cache
        asked(model, prompts[1])
        assert double.captures == 4
        goes_on = _next_turn(model, held, first)
    with rounding_as(model.dtype), growing(), duotone.enable(model, MIXED) as session:
        assert torch.equal(asked(model, prompts[0]), first)
        assert torch.equal(_next_turn(model, session.cache, first), goes_on)


def test_a_cache_that_thawed_takes_its_buffers_along(double: type[ReplayDouble]) -> None:
    model, prompt = exact_model("internvl"), prompt_of(ROWS["short"])
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        first = asked(model, prompt)
        held = session.cache
        held.timeline.thaw()
        visual = held.layers[0].store.visual.key.scale.clone()
        asked(model, prompt_of(ROWS["short"], seed=1))
        assert torch.equal(held.layers[0].store.visual.key.scale, visual)
        assert torch.equal(asked(model, prompt), first)


def _next_turn(model: PreTrainedModel, cache: QuantizedCache, so_far: Tensor) -> Tensor:
    ids = torch.cat([so_far, torch.full((2, 3), 7)], 1)
    mask = torch.ones_like(ids)
    mask[:, : so_far.shape[1] - NEW] = prompt_of(ROWS["short"])["attention_mask"]
    call = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
    return model.generate(**call, max_new_tokens=NEW, do_sample=False)


def test_a_cache_that_moved_is_a_cache_like_any(double: type[ReplayDouble]) -> None:
    """Its memory is what a fresh one's is; it crops, copies and goes on."""
    model, prompts = exact_model("internvl"), [prompt_of(ROWS["short"], seed=n) for n in range(2)]
    turns, reports = [], []
    for calls in ([0, 1], [1]):
        with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
            for call in calls:
                answer = asked(model, prompts[call])
            cache = session.cache
            timeline = cache.timeline
            for store, static in zip(timeline.stores, timeline.frozen.decoder.stores, strict=True):
                assert store.visual is static.visual
            reports.append(session.memory())
            turns.append(_next_turn(model, session.cache, answer))
            session.cache.crop(-5)
    assert torch.equal(*turns)
    assert reports[0] == reports[1]


def test_no_more_is_kept_than_allowed(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = exact_model("internvl"), prompt_of(ROWS["short"])
    monkeypatch.setattr(kept_steps, "MOST_BYTES", 2000)
    with duotone.enable(model, MIXED) as session, rounding_as(model.dtype):
        asked(model, prompt)
        assert session.graph_bytes() == 0
        asked(model, prompt)
    assert double.captures == 4


@pytest.mark.parametrize("how", ["asked", "with the model"])
def test_what_is_kept_is_freed(double: type[ReplayDouble], how: str) -> None:
    model, prompt = new_model("internvl"), prompt_of(ROWS["short"])
    with duotone.enable(model, MIXED) as session, rounding_as(model.dtype):
        asked(model, prompt)
        buffer = weakref.ref(session.cache.timeline.frozen.decoder.stores[0].key)
        _forget(session)
    gc.collect()
    assert buffer() is not None
    if how == "asked":
        session.free_graphs()
        assert session.graph_bytes() == 0
    else:
        del session, model
        gc.collect()
    assert buffer() is None


def _forget(session: Session) -> None:
    session.cache = None


def test_buffers_are_freed_with_their_last_user(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: no collector has to find them."""
    monkeypatch.setattr(kept_steps, "MOST_KEPT", 1)
    model = exact_model("internvl")
    prompts = [prompt_of(ROWS["short"]), prompt_of(ROWS["short"] + [[7]])]
    gc.collect()
    gc.disable()
    try:
        with duotone.enable(model, MIXED) as session, rounding_as(model.dtype):
            asked(model, prompts[0])
            buffer = weakref.ref(session.cache.timeline.frozen.decoder.stores[0].key)
            asked(model, prompts[1])
            assert buffer() is None
            buffer = weakref.ref(session.cache.timeline.frozen.decoder.stores[0].key)
        session.cache = None
        session.free_graphs()
        assert buffer() is None
    finally:
        gc.enable()
