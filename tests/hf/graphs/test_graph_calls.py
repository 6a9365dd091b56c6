"""A call that decodes by graphs: its steps that are not replayed, its buffers and its end."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from graph_answers import NEW, StopAt, answer, batch_of
from replay_double import ReplayDouble, double, growing
from small_specs import MIXED, STREAM
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessor

import duotone
from duotone import CacheSpec, QuantizedCache
from duotone.hf.graphs import decode_call, decode_steps
from duotone.tools.slow_paths import SlowPathWarning

from exactly import rounding_as
from families import exact_model, inputs, new_model, tiny_model, typed

__all__ = ["double"]  # a fixture


@pytest.mark.skipif(
    transformers.__version__.startswith("5.17"), reason="its mask goes on with cropped tokens"
)
def test_a_crop_within_a_call_ends_the_replays(double: type[ReplayDouble]) -> None:
    model, given, outs = exact_model("llama"), inputs("llama", [[23]]), []

    class Crop(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] == 40:
                session.cache.crop(30)
            return scores

    for graphs in (True, False):
        with (
            nullcontext() if graphs else growing(),
            rounding_as(model.dtype),
            duotone.enable(model, STREAM) as session,
        ):
            call = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": [Crop()]}
            outs.append(model.generate(**given, **call))
    assert torch.equal(*outs)
    assert 0 < double.replays < 20


@pytest.mark.parametrize("graphs", [True, False])
def test_rows_that_are_picked_keep_their_counts(double: type[ReplayDouble], graphs: bool) -> None:
    """The longest prompt has most evicted tokens."""
    model, given = exact_model("internvl"), batch_of("internvl")
    cache = answer(model, duotone.scheme("vl-cache"), given, graphs).session.cache
    before = cache.memory().dense_equivalent_bytes
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    seen = given["attention_mask"].sum(1) + NEW - 1
    assert cache.memory().dense_equivalent_bytes * seen.sum() == before * 3 * seen[0]


def test_steps_may_run_in_the_buffers_without_graphs(double: type[ReplayDouble]) -> None:
    model, given = exact_model("internvl"), batch_of("internvl")
    with rounding_as(model.dtype), duotone.enable(model, MIXED, graphs=False) as session:
        call = {"max_new_tokens": NEW, "do_sample": False}
        ours = model.generate(**typed(model, given), **call)
        assert session.cache.timeline.frozen.steps == NEW - 1
    assert torch.equal(ours, answer(model, MIXED, given, graphs=False).sequences)
    assert not double.captures


@pytest.mark.parametrize(
    "steps",
    [range(1, 2), range(1, 99), range(4, 5)],
    ids=["a prompt of one token", "every step", "a later step"],
)
def test_inputs_without_a_place_are_said_where_they_stay(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, steps: range
) -> None:
    model, given, calls = new_model("llama"), inputs("llama", [[23]]), []
    prepare = model.prepare_inputs_for_generation

    def prepared(ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        found = prepare(ids, **kwargs)
        if found["input_ids"].shape[1] == 1:
            calls.append(found)
            if len(calls) in steps:
                found["pixel_values"] = torch.zeros(1)
        return found

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepared)
    with warnings.catch_warnings(record=True) as said, duotone.enable(model, STREAM):
        warnings.simplefilter("always")
        model.generate(**given, max_new_tokens=12, do_sample=False)
    places = [x for x in said if "no place for pixel_values" in str(x.message)]
    assert len(places) == (steps != range(1, 2))
    assert (double.captures > 0) is (steps != range(1, 99))


def test_the_rule_for_hooks_is_said_once(double: type[ReplayDouble]) -> None:
    model, given, seen = new_model("llama"), inputs("llama", [[23]]), []
    layer = model.model.layers[1]
    hook = layer.register_forward_hook(lambda *call: seen.append(call))
    with duotone.enable(model, STREAM):
        with pytest.warns(SlowPathWarning, match=r"hooks that read .* first of model\.layers\.1"):
            model.generate(**given, max_new_tokens=12, do_sample=False)
        model.generate(**given, max_new_tokens=12, do_sample=False)
        assert len(seen) == 24
        assert not double.captures
        hook.remove()
        model.generate(**given, max_new_tokens=12, do_sample=False)
        assert double.captures


@pytest.mark.parametrize("runs", [False, True], ids=["at once", "after its body"])
def test_a_step_that_cannot_be_captured_runs_as_it_is(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """After its body: another thread has waited for the device, which makes the capture void."""

    def refuse(body: Callable, device: torch.device) -> None:
        if runs:
            double(body, device)
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    monkeypatch.setattr(decode_steps, "capture", refuse)
    model, given = exact_model("llama"), batch_of("llama")
    theirs = answer(model, STREAM, given, graphs=False)
    fresh = copy.deepcopy(model)
    warned = pytest.warns(SlowPathWarning, match="not permitted")
    with duotone.enable(fresh, STREAM), warned, rounding_as(fresh.dtype):
        ours = fresh.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(ours, theirs.sequences)
    assert bool(double.captures) == runs
    assert not double.replays


def test_a_cache_that_holds_still_can_be_asked_anything(double: type[ReplayDouble]) -> None:
    model, given = exact_model("internvl"), batch_of("internvl")
    with rounding_as(model.dtype), duotone.enable(model, MIXED) as session:
        model.generate(**typed(model, given), max_new_tokens=NEW, do_sample=False)
        cache = session.cache
        assert cache.timeline.frozen is not None
        held = session.memory()
        assert held.dense_equivalent_bytes == _dense_equivalent(model, given)
        assert cache.get_seq_length() == given["input_ids"].shape[1] + NEW - 1
        clone = copy.deepcopy(cache)
        assert cache.timeline.frozen is None
        cache.crop(-7)
        assert cache.get_seq_length() == given["input_ids"].shape[1] + NEW - 8
        cache.batch_select_indices(torch.tensor([2, 0]))
        assert cache.memory().dense_equivalent_bytes < clone.memory().dense_equivalent_bytes


def _dense_equivalent(model: PreTrainedModel, given: dict) -> int:
    out = answer(model, MIXED, given, graphs=False)
    return out.session.cache.memory().dense_equivalent_bytes


@pytest.mark.parametrize("name", ["llama", "internvl"])
def test_an_answer_goes_on_with_its_cache(double: type[ReplayDouble], name: str) -> None:
    """Its prompt is then one token: the last one of the first call."""
    model, given = exact_model(name), batch_of(name)
    whole = answer(model, STREAM, given, graphs=False).sequences
    half, mask = NEW // 2, given["attention_mask"]
    call = {"max_new_tokens": half, "do_sample": False}
    with rounding_as(model.dtype), duotone.enable(model, STREAM) as session:
        ids = model.generate(**typed(model, given), **call)
        more = {"attention_mask": torch.cat([mask, mask.new_ones(len(ids), half)], 1)}
        more |= {"past_key_values": session.cache, **call}
        replays = double.replays
        assert torch.equal(model.generate(input_ids=ids, **more), whole)
    assert double.replays >= replays + half - 1


@pytest.mark.parametrize(
    ("later", "replays"), [({"labels": None}, True), ({"logits_to_keep": 1}, False)]
)
def test_arguments_that_come_later(
    double: type[ReplayDouble], later: dict, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None counts as left out, and any other change is said."""
    model, given = new_model("llama"), inputs("llama", [[23]])
    prepare, steps = model.prepare_inputs_for_generation, []

    def prepared(*args: Any, **kwargs: Any) -> dict:
        found = prepare(*args, **kwargs)
        found.pop("logits_to_keep", None)
        steps.append(found)
        return {**found, **(later if len(steps) > 3 else {})}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepared)
    said = nullcontext() if replays else pytest.warns(SlowPathWarning, match="logits_to_keep")
    with said, duotone.enable(model, STREAM):
        model.generate(**given, max_new_tokens=12, do_sample=False)
    assert (double.replays > 3) == replays


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_broken_step_shows(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, given = new_model(name), inputs(name, [[23]])

    def fail(self: ReplayDouble) -> None:
        raise KeyboardInterrupt

    with duotone.enable(model, STREAM) as session:
        monkeypatch.setattr(double, "replay", fail)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**given, max_new_tokens=12, do_sample=False)
        for _ in range(2):  # whenever the cache is asked
            with pytest.raises(RuntimeError, match="the last decode step broke off"):
                session.cache.crop(-1)
        monkeypatch.undo()
        model.generate(**given, max_new_tokens=12, do_sample=False)


def test_nothing_outlives_its_use(double: type[ReplayDouble]) -> None:
    model, given = new_model("llama"), inputs("llama", [[23]])
    with duotone.enable(model, STREAM) as session:
        model.generate(**given, max_new_tokens=12, do_sample=False)
        assert decode_call.current_call() is None
        first = weakref.ref(session.cache)
        model.generate(**given, max_new_tokens=12, do_sample=False)
    assert "forward" not in vars(model)
    gc.collect()
    assert first() is None


def test_threads_decode_each_its_own(double: type[ReplayDouble]) -> None:
    model, prompts = exact_model("llama"), [inputs("llama", [[n]], seed=n) for n in (9, 17, 30)]
    expected = [answer(model, STREAM, given, graphs=False).sequences for given in prompts]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        cache = QuantizedCache(model, STREAM)
        call = {**prompts[number], "past_key_values": cache, "max_new_tokens": NEW}
        found[number] = model.generate(**call, do_sample=False)

    with rounding_as(model.dtype), duotone.enable(model, STREAM):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[n], expected[n]) for n in range(3))


def test_cpus_decode_step_by_step() -> None:
    model, given = tiny_model("llama"), inputs("llama", [[23]])
    with duotone.enable(model, STREAM) as session:
        model.generate(**given, max_new_tokens=12, do_sample=False)
        assert session.cache.timeline.frozen is None


@pytest.mark.parametrize(
    ("asked", "room"), [({"max_new_tokens": 70}, 128), ({"max_length": 60}, 64), ({}, 100)], ids=str
)
def test_room_is_for_as_many_tokens_as_can_come(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, asked: dict, room: int
) -> None:
    monkeypatch.setattr(decode_steps, "FIRST_ROOM", 100)
    model, given = new_model("llama"), inputs("llama", [[23]])
    stop = {"stopping_criteria": [StopAt()]}
    with duotone.enable(model, STREAM) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of transformers, where nothing is asked
        model.generate(**given, **asked, **stop, do_sample=False)
        assert session.cache.timeline.frozen.room == room


def test_bytes_of_a_token_are_those_that_it_adds() -> None:
    model, given = tiny_model("llama"), inputs("llama", [[23], [9]])
    dense = CacheSpec(visual="dense", text="dense")
    with duotone.enable(model, dense) as session:
        sizes = []
        for new in (3, 4):
            model.generate(**given, max_new_tokens=new, do_sample=False)
            sizes.append(session.memory().dense_equivalent_bytes)
        assert sizes[1] - sizes[0] == session.cache.token_bytes > 0
