"""Families whose layers keep states: linear attention, Mamba, and short convolutions."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_specs import MIXED
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import QuantizedCache
from duotone.inference.memory import cache_memory

from families import HYBRIDS, inputs, tiny_model

DENSE = duotone.scheme("dense")
NEW = 6
# One per kind of state in the default tier; the others are alike.
FIRST = ("lfm2", "nemotron_h", "qwen3_next")
NAMES = [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.slow)
    for name in HYBRIDS
    if name not in ("qwen3_5", "cohere2")
]


def given_of(name: str, rows: int = 2) -> dict[str, Tensor]:
    has_pictures = HYBRIDS[name].is_multimodal
    return inputs(name, [[3, "image", 9] if has_pictures else [17], [7]][:rows])


def answer(model: PreTrainedModel, given: dict[str, Tensor], cache: Any, **mode: Any) -> Tensor:
    mode = {"max_new_tokens": NEW, **mode}
    return model.generate(**given, past_key_values=cache, **mode)


def own_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_models_own_cache(name: str) -> None:
    model, given = tiny_model(name), given_of(name)
    # Llama 4 itself refuses pictures under beams: it repeats ids, and not the pictures.
    beams = given if name != "llama4" else inputs(name, [[20], [7]])
    for mode, asked in (({}, given), ({"num_beams": 3}, beams)):
        ours = answer(model, asked, QuantizedCache(model, DENSE), **mode)
        assert torch.equal(ours, answer(model, asked, own_cache(model), **mode))


@pytest.mark.parametrize("name", NAMES)
def test_a_later_turn_reads_states_from_a_file(name: str, tmp_path: Path) -> None:
    model, given, answers = tiny_model(name), given_of(name), []
    for cache in (QuantizedCache(model, DENSE), own_cache(model)):
        ids = answer(model, given, cache)
        if isinstance(cache, QuantizedCache):
            cache.save(tmp_path / "cache")
            cache = QuantizedCache.load(tmp_path / "cache", model)
        ids = torch.cat([ids, torch.arange(12).view(2, 6) + 20], 1)
        more = torch.ones(2, ids.shape[1] - given["input_ids"].shape[1], dtype=torch.long)
        mask = torch.cat([given["attention_mask"], more], 1)
        answers.append(answer(model, {"input_ids": ids, "attention_mask": mask}, cache))
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_compared_with_the_models_own_cache(name: str) -> None:
    model, given, own = tiny_model(name), given_of(name, 1), own_cache(tiny_model(name))
    cache = QuantizedCache(model, MIXED)
    with torch.no_grad():
        for each in (own, cache):
            model(**given, past_key_values=each)
    counted, report = cache_memory(own), cache.memory()
    assert report.dense_equivalent_bytes == counted["total_bytes"] > counted["state_bytes"]
    assert report.state_bytes == counted["state_bytes"] > 0


def test_layers_without_a_cache_have_none() -> None:
    cache = QuantizedCache(tiny_model("nemotron_h"), DENSE)
    assert (cache.facts.states, cache.facts.empty, cache.facts.packed) == ((0, 4), (1, 3), (2, 5))
    assert [hasattr(layer, "store") for layer in copy.deepcopy(cache).layers][2::3] == [True] * 2
    assert list(cache.timeline.own.empty) == [1, 3]
