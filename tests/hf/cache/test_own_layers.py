"""Layers that keep a state instead of K and V: Qwen3.5's linear attention, beside packed layers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_double import ReplayDouble, double
from saved_caches import rewrite
from small_specs import MIXED
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import QuantizedCache
from duotone.hf.cache.own_layers import state_tensors
from duotone.inference.memory import cache_memory

from families import inputs, tiny_model

DENSE = duotone.scheme("dense")
PROMPTS = [[3, "image", 9], [7]]
NEW = 5
__all__ = ["double"]  # a fixture


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_5")


def filled(model: PreTrainedModel, spec: duotone.CacheSpec = MIXED) -> QuantizedCache:
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**inputs("qwen3_5", PROMPTS), past_key_values=cache)
    return cache


def next_tokens(model: PreTrainedModel, cache: QuantizedCache) -> Tensor:
    """Logits of one more token, read through a copy."""
    rows, seen = cache.timeline.batch, cache.length
    given = {"input_ids": torch.full((rows, 1), 7), "position_ids": torch.full((3, rows, 1), seen)}
    mask = torch.ones(rows, seen + 1, dtype=torch.long)
    with torch.no_grad():
        return model(**given, attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_are_those_of_the_models_own_cache(
    model: PreTrainedModel, mode: dict[str, Any]
) -> None:
    given = inputs("qwen3_5", PROMPTS)
    own = model.generate(**given, **mode, max_new_tokens=NEW)
    with duotone.enable(model, DENSE):
        assert torch.equal(model.generate(**given, **mode, max_new_tokens=NEW), own)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("spec", [DENSE, MIXED], ids=["dense", "packed"])
def test_a_later_turn_reads_the_states(model: PreTrainedModel, spec: duotone.CacheSpec) -> None:
    first, answers = inputs("qwen3_5", PROMPTS), []
    question = torch.randint(2, 280, (2, 6))
    for cache in (QuantizedCache(model, spec), None):
        out = model.generate(
            **first, past_key_values=cache, max_new_tokens=NEW, return_dict_in_generate=True
        )
        ids = torch.cat([out.sequences, question], 1)
        more = torch.ones(2, ids.shape[1] - first["input_ids"].shape[1], dtype=torch.long)
        mask = torch.cat([first["attention_mask"], more], 1)
        given = {"attention_mask": mask, "past_key_values": out.past_key_values}
        answers.append(model.generate(ids, **given, max_new_tokens=NEW))
    assert torch.equal(*answers)


def test_states_are_counted_and_follow_their_sequences(model: PreTrainedModel) -> None:
    cache = filled(model)
    own = cache.timeline.own
    before, report = next_tokens(model, cache), cache.memory()
    assert report.state_bytes == sum(x.nbytes for x in own.tensors.values()) > 0
    parts = ("codes_bytes", "params_bytes", "dense_bytes", "index_bytes", "state_bytes")
    assert report.total_bytes == sum(getattr(report, name) for name in parts)
    assert f"{report.state_bytes:,} bytes" in str(report).splitlines()[-1]
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.batch_repeat_interleave(3)
    assert own.nbytes == report.state_bytes * 3 // 2
    assert torch.allclose(next_tokens(model, cache), before[[1, 1, 1]], atol=1e-4)
    cache.reset()
    assert own.nbytes == cache.length == 0
    with torch.no_grad():
        model(**inputs("qwen3_5", PROMPTS), past_key_values=cache)
    assert torch.equal(next_tokens(model, cache), before)


def test_states_are_saved_and_checked(model: PreTrainedModel, tmp_path: Path) -> None:
    path, cache = tmp_path / "cache", filled(model)
    cache.save(path)
    loaded = QuantizedCache.load(path, model)
    assert torch.equal(next_tokens(model, loaded), next_tokens(model, cache))
    assert loaded.memory().state_bytes == cache.memory().state_bytes

    def lose(_: dict, tensors: dict[str, Tensor]) -> None:
        del tensors["states.4.recurrent_states.0"]

    def widen(_: dict, tensors: dict[str, Tensor]) -> None:
        tensors["states.2.conv_states.0"] = tensors["states.2.conv_states.0"].double()

    def spoil(_: dict, tensors: dict[str, Tensor]) -> None:
        tensors["states.0.conv_states.0"][0, 0, 0] = float("nan")

    for change, said in ((lose, "layer 4 has"), (widen, "layer 2 has"), (spoil, "must be finite")):
        cache.save(path)
        rewrite(path, change)
        with pytest.raises(ValueError, match=f"{path} cannot be loaded.*{said}"):
            QuantizedCache.load(path, model)


# torch calls no hook after the second one, so the cache hears of no end.
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_step_that_broke_off_after_the_last_packed_layer_shows(
    model: PreTrainedModel, error: type[BaseException]
) -> None:
    cache = filled(model)

    def fail(*_: object) -> None:
        raise error

    hook = model.get_decoder().layers[4].register_forward_pre_hook(fail)
    try:
        with pytest.raises(error):
            model(torch.full((2, 1), 7), past_key_values=cache)
    finally:
        hook.remove()
    with pytest.raises(RuntimeError, match="not consistent any more"):
        cache.memory()


# What a layer records is the model's own tensor, perhaps a view.
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_a_cache_keeps_no_gradients(name: str, records: bool) -> None:
    model, given = tiny_model(name), inputs(name, PROMPTS[:1])
    cache = QuantizedCache(model, MIXED)
    if records:
        cache.activate_past_recording()
    loss = model(**given, past_key_values=cache).logits.sum()
    one = {"input_ids": torch.full((1, 1), 7)}
    if name == "gemma3":
        one["token_type_ids"] = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(2):
        assert not any(x.requires_grad for x in cache.timeline.own.tensors.values())
        assert copy.deepcopy(cache).length == cache.length
        model(**one, past_key_values=cache)
    assert torch.autograd.grad(loss, model.get_input_embeddings().weight)[0].isfinite().all()


def test_a_prompt_of_inference_mode_goes_on_outside(model: PreTrainedModel) -> None:
    expected, cache = filled(model), QuantizedCache(model, MIXED)
    with torch.inference_mode():
        model(**inputs("qwen3_5", PROMPTS), past_key_values=cache)
    with torch.no_grad():
        for each in (expected, cache):  # not of a copy, which is of no mode
            model(torch.full((2, 1), 7), past_key_values=each)
    assert torch.equal(next_tokens(model, cache), next_tokens(model, expected))


def test_what_no_state_allows_is_refused(model: PreTrainedModel) -> None:
    cache = filled(model)
    before = next_tokens(model, cache)
    with pytest.raises(NotImplementedError, match="no token can be taken out of a state"):
        cache.crop(-1)
    assert torch.equal(next_tokens(model, cache), before)


def test_a_models_layers_are_all_there(model: PreTrainedModel) -> None:
    cache = filled(model, DENSE)
    assert [hasattr(layer, "store") for layer in cache.layers] == [False, True, False, True, False]
    assert all(state_tensors(cache.layers[n]) for n in cache.facts.own)


def test_dense_bytes_are_those_of_the_models_own_cache(model: PreTrainedModel) -> None:
    given = inputs("qwen3_5", [[3, "image", 9]])
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache = QuantizedCache(model, MIXED)
    with torch.no_grad():
        for each in (own, cache):
            model(**given, past_key_values=each)
    counted, report = cache_memory(own), cache.memory()
    assert counted["state_bytes"] == report.state_bytes
    assert counted["total_bytes"] == report.dense_equivalent_bytes


def test_decode_steps_are_captured(model: PreTrainedModel, double: type[ReplayDouble]) -> None:
    given = inputs("qwen3_5", PROMPTS)
    own = model.generate(**given, max_new_tokens=NEW)
    with duotone.enable(model, DENSE):
        assert torch.equal(model.generate(**given, max_new_tokens=NEW), own)
    assert double.captures
