"""Sliding windows next to layers that see all tokens: transformers' own layers, in 16 bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_caches import rewrite
from small_specs import MIXED, STREAM
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import QuantizedCache
from duotone.inference.memory import cache_memory
from duotone.tune.bits import held

from families import IMAGE, inputs, new_model, tiny_model

DENSE = duotone.scheme("dense")
NAMES = ["gemma3", "cohere2", pytest.param("paligemma2", marks=pytest.mark.slow)]
# Longer than the window of 24, and shorter.
PROMPTS: dict[str, list[list[int | str]]] = {
    "gemma3": [[20, "image", 9], [3, "image", 4]],
    "cohere2": [[35], [13]],
    "paligemma2": [[20, "image", 9], [3, "image", 4]],
}
LONG: dict[str, list[list[int | str]]] = {
    "gemma3": [[30, "image", 40, "image", 90]],
    "cohere2": [[172]],
    "paligemma2": [[30, "image", 40, "image", 90]],
}
NEW = 6


def read(model: PreTrainedModel, given: dict[str, Tensor], cache: Any) -> Any:
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache


def filled(name: str, spec: duotone.CacheSpec = DENSE) -> QuantizedCache:
    model = tiny_model(name)
    return read(model, inputs(name, PROMPTS[name]), QuantizedCache(model, spec))


def next_logits(name: str, cache: Any, tokens: int = 1) -> Tensor:
    """Logits of more tokens, read through a copy."""
    cache = copy.deepcopy(cache)
    rows = cache.timeline.batch
    mask = torch.ones(rows, cache.length + tokens, dtype=torch.long)
    ids = torch.arange(7, 7 + tokens).expand(rows, -1)
    with torch.no_grad():
        return tiny_model(name)(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "crop"]
)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_models_own_cache(name: str, mode: dict[str, Any]) -> None:
    model = tiny_model(name)
    given = inputs(name, PROMPTS[name][:1] if "prompt_lookup_num_tokens" in mode else PROMPTS[name])
    if "prompt_lookup_num_tokens" in mode:  # candidates come of words that are there twice
        given["input_ids"][:, -4:] = given["input_ids"][:, 4:8]
    own = model.generate(**given, **mode, max_new_tokens=NEW)
    with duotone.enable(model, DENSE) as session:
        assert torch.equal(model.generate(**given, **mode, max_new_tokens=NEW), own)
        assert len(session.cache.timeline.own.windows) == 2


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", NAMES)
def test_a_later_turn_reads_windows(name: str) -> None:
    model, first, answers = tiny_model(name), inputs(name, PROMPTS[name]), []
    question = torch.randint(2, 280, (2, 8))
    for cache in (QuantizedCache(model, MIXED), None):
        out = model.generate(
            **first, past_key_values=cache, max_new_tokens=NEW, return_dict_in_generate=True
        )
        ids = torch.cat([out.sequences, question], 1)
        more = torch.ones(2, ids.shape[1] - first["input_ids"].shape[1], dtype=torch.long)
        given = {"attention_mask": torch.cat([first["attention_mask"], more], 1)}
        if name == "gemma3":
            given["token_type_ids"] = torch.zeros_like(ids)
        given["past_key_values"] = out.past_key_values
        answers.append(model.generate(ids, **given, max_new_tokens=NEW))
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", NAMES)
def test_no_scheme_takes_more_than_the_models_own_cache(name: str) -> None:
    model, given = tiny_model(name), inputs(name, LONG[name])
    own = cache_memory(read(model, given, DynamicCache(config=model.config)))
    for scheme in ("kivi", "duotone-stream", "duotone-mixed"):
        report = read(model, given, QuantizedCache(model, duotone.scheme(scheme, bits=2))).memory()
        assert report.dense_equivalent_bytes == own["total_bytes"] > report.total_bytes
        assert report.state_bytes == own["state_bytes"] > 0


def test_layers_that_all_have_windows_are_compared_with_windows() -> None:
    model = new_model("mistral")
    model.config.sliding_window = 24
    given = inputs("mistral", [[60]])
    own = cache_memory(read(model, given, DynamicCache(config=model.config)))
    report = read(model, given, QuantizedCache(model, DENSE)).memory()
    assert report.state_bytes == 0
    assert report.dense_equivalent_bytes == own["total_bytes"] < report.total_bytes
    plan = duotone.plan(model, DENSE, text_tokens=60)
    assert plan.dense_equivalent_bytes == report.dense_equivalent_bytes


@pytest.mark.parametrize("tokens", [12, 60])
def test_a_plan_counts_windows(tokens: int) -> None:
    model = tiny_model("cohere2")
    own = read(model, inputs("cohere2", [[tokens]]), DynamicCache(config=model.config))
    plan = duotone.plan(model, DENSE, text_tokens=tokens)
    assert plan.dense_equivalent_bytes == cache_memory(own)["total_bytes"]
    assert plan.bytes_per_sequence == plan.dense_equivalent_bytes


def test_a_search_counts_bits_of_packed_layers() -> None:
    cache = filled("gemma3", MIXED)
    mask = inputs("gemma3", PROMPTS["gemma3"])["input_ids"] == IMAGE
    assert held(cache, mask, "cache").bits == pytest.approx(cache.memory().bits_per_element)
    streamed = filled("gemma3", STREAM)
    bits = [held(each, mask, "visual").bits for each in (streamed, _without_windows(streamed))]
    assert bits[0] == bits[1]


def _without_windows(cache: QuantizedCache) -> QuantizedCache:
    clone = copy.deepcopy(cache)
    clone.timeline.own.windows.clear()
    return clone


def test_a_prompts_old_tokens_are_let_go() -> None:
    for layer in filled("gemma3").timeline.own.windows.values():
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
        assert layer.keys.shape[2] == 23


def test_windows_follow_their_sequences() -> None:
    cache = filled("gemma3", MIXED)
    before = next_logits("gemma3", cache)
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.batch_repeat_interleave(3)
    assert torch.allclose(next_logits("gemma3", cache), before[[1, 1, 1]], atol=1e-4)
    cache.reset()
    assert cache.timeline.own.nbytes == cache.length == 0
    read(tiny_model("gemma3"), inputs("gemma3", PROMPTS["gemma3"]), cache)
    assert torch.equal(next_logits("gemma3", cache), before)


def test_windows_are_saved_and_checked(tmp_path: Path) -> None:
    path, cache = tmp_path / "cache", filled("gemma3", MIXED)
    cache.save(path)
    loaded = QuantizedCache.load(path, tiny_model("gemma3"))
    assert torch.equal(next_logits("gemma3", loaded, 3), next_logits("gemma3", cache, 3))

    def lose(_: dict, tensors: dict[str, Tensor]) -> None:
        del tensors["states.2.values.0"]

    def shorten(_: dict, tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("states.")]:
            tensors[name] = tensors[name][:, :, 1:].contiguous()

    for change, said in ((lose, "layer 2 has"), (shorten, r"\(2, 23, 16\)")):
        cache.save(path)
        rewrite(path, change)
        with pytest.raises(ValueError, match=f"{path} cannot be loaded.*{said}"):
            QuantizedCache.load(path, tiny_model("gemma3"))


def test_crop_of_nothing_is_nothing() -> None:
    cache = _empty("gemma3")
    cache.activate_past_recording()
    cache.crop(0)
    assert cache.length == 0


def test_recorded_tokens_are_not_saved(tmp_path: Path) -> None:
    cache = filled("gemma3", MIXED)
    cache.activate_past_recording()
    next_step(cache)
    held = cache.memory().state_bytes
    cache.save(tmp_path / "cache")
    loaded = QuantizedCache.load(tmp_path / "cache", tiny_model("gemma3"))
    assert loaded.memory().state_bytes == held * 23 // 24
    assert torch.equal(next_logits("gemma3", loaded), next_logits("gemma3", cache))


def test_crop_goes_as_far_back_as_windows_do() -> None:
    cache = filled("gemma3")
    before = next_logits("gemma3", cache)
    with pytest.raises(NotImplementedError, match=r"activate_past_recording\(\)"):
        cache.crop(-1)
    cache.activate_past_recording()
    more = {"input_ids": torch.full((2, 4), 9), "token_type_ids": torch.zeros(2, 4).long()}
    read(tiny_model("gemma3"), more, cache)
    with pytest.raises(NotImplementedError, match="a window of 24 tokens"):
        cache.crop(-5)
    cache.crop(-4)
    assert torch.allclose(next_logits("gemma3", cache), before, atol=1e-5)
    assert all(x.keys.shape[2] == 23 for x in cache.timeline.own.windows.values())
    read(tiny_model("gemma3"), more, cache)
    cache.crop(0)
    assert all(x.keys.shape[2] == 23 for x in cache.timeline.own.windows.values())
    short = read(tiny_model("cohere2"), inputs("cohere2", [[9]]), _empty("cohere2"))
    other = read(tiny_model("cohere2"), inputs("cohere2", [[9]]), _empty("cohere2"))
    read(tiny_model("cohere2"), {"input_ids": torch.full((1, 4), 9)}, short)
    short.crop(-4)
    assert torch.allclose(next_logits("cohere2", short), next_logits("cohere2", other), atol=1e-5)


def _empty(name: str) -> QuantizedCache:
    return QuantizedCache(tiny_model(name), DENSE)


def test_absorbed_windows_are_those_of_a_prompt() -> None:
    model, given = tiny_model("cohere2"), inputs("cohere2", LONG["cohere2"])
    cache = _empty("cohere2")
    full = read(model, given, DynamicCache())
    cache.absorb(full, attention_mask=given["attention_mask"])
    expected = read(model, given, _empty("cohere2"))
    # All tokens at once or a window of them: another order of sums.
    assert torch.allclose(
        next_logits("cohere2", cache), next_logits("cohere2", expected), atol=1e-3
    )


def _outside(cache: QuantizedCache) -> None:
    window = cache.timeline.own.windows[0]
    window.update(window.keys[:, :, :1], window.values[:, :, :1])


def _raised(cache: QuantizedCache) -> None:
    def fail(*_: object) -> None:
        raise KeyError

    hook = tiny_model("gemma3").get_decoder().layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(KeyError):
            next_step(cache)
    finally:
        hook.remove()


def next_step(cache: QuantizedCache) -> None:
    one = {"input_ids": torch.full((2, 1), 7), "token_type_ids": torch.zeros(2, 1).long()}
    read(tiny_model("gemma3"), one, cache)


@pytest.mark.parametrize("spoil", [_outside, _raised], ids=["outside", "raised"])
def test_windows_of_another_length_show(spoil: Callable[[QuantizedCache], None]) -> None:
    cache = filled("gemma3")
    spoil(cache)
    with pytest.raises(RuntimeError, match="not consistent any more"):
        next_step(cache)
