"""Caches are heard of under every name that the installed transformers takes."""

import inspect
import re
import warnings

import pytest
import torch
from small_specs import STREAM
from transformers import GenerationMixin, LlamaForCausalLM

import duotone
from duotone.hf.model.cache_argument import CACHE, NAMES, given_cache

from families import inputs, tiny_model
from paths import REPOSITORY

TAKEN = [CACHE, "past_key_values"] if CACHE != "past_key_values" else [CACHE]
CALL = {"max_new_tokens": 5, "do_sample": False}


def prompt() -> dict[str, torch.Tensor]:
    return inputs("internvl", [[3, "image", 9], [5, "image"]])


def test_the_name_is_the_one_of_models_and_generate() -> None:
    for taking in (LlamaForCausalLM.forward, GenerationMixin.prepare_inputs_for_generation):
        assert CACHE in inspect.signature(taking).parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_found_by_either_name(name: str) -> None:
    cache = object()
    assert given_cache({"input_ids": None, name: cache}) is cache
    assert given_cache({"input_ids": None, name: None}) is None


@pytest.mark.parametrize("name", TAKEN)
def test_calls_with_a_cache_of_either_name_say_the_same(name: str) -> None:
    model, given = tiny_model("internvl"), prompt()
    with duotone.enable(model, STREAM):
        expected = model.generate(**given, **CALL)
    cache = duotone.QuantizedCache(model, STREAM)
    assert torch.equal(model.generate(**given, **CALL, **{name: cache}), expected)
    assert cache.length == expected.shape[1] - 1
    with duotone.enable(model, STREAM) as session:
        inside = duotone.QuantizedCache(model, STREAM)
        assert torch.equal(model.generate(**given, **CALL, **{name: inside}), expected)
    assert session.cache is None


@pytest.mark.parametrize("name", TAKEN)
def test_steps_of_either_name_are_heard_of(name: str) -> None:
    model, cache = tiny_model("internvl"), duotone.QuantizedCache(tiny_model("internvl"), STREAM)
    with torch.no_grad():
        out = model(**prompt(), **{name: cache})
    assert cache.length == out.logits.shape[1]
    assert out[CACHE] is cache


@pytest.mark.parametrize("name", TAKEN)
def test_no_cache_by_name_gets_a_fresh_one_and_no_word(name: str) -> None:
    model = tiny_model("internvl")
    with warnings.catch_warnings(), duotone.enable(model, STREAM) as session:
        warnings.simplefilter("error")
        model.generate(**prompt(), **CALL, **{name: None})
    assert session.cache is not None


@pytest.mark.parametrize("folder", ["src", "benchmarks"])
def test_code_of_ours_gives_no_cache_by_a_name_of_its_own(folder: str) -> None:
    """A name of one version fails or warns in another; docstrings may mention it."""
    used = re.compile(r"past_key_values *=[^=]|[\"'.]past_key_values")
    files = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / folder).rglob("*.py")}
    found = {path.name for path, text in files.items() if used.search(text)}
    assert found == ({"cache_argument.py"} if folder == "src" else set())
