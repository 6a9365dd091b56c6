"""Layers that keep K and V of pictures beside the tokens (Mllama)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shrunk import tiny_model_of
from shrunk_pictures import with_picture
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec

from families import LOGIT_TOLERANCE, logit_error

# transformers 5.17 calls its own tower by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated")
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8))
EXACT = CacheSpec(visual="text", text=STREAM, sink=2, recent=3)
KIVI = duotone.scheme("kivi", bits=2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model_of("mllama")


def answer(model: PreTrainedModel, given: dict[str, Tensor], cache: Any, **more: Any) -> Any:
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**given, past_key_values=cache, max_new_tokens=5, **settings, **more)


def next_turn(given: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """Text alone, about the picture that the cache knows."""
    ids = torch.cat((sequences, torch.full((2, 4), 9)), 1)
    more = ids.shape[1] - given["input_ids"].shape[1]
    mask = torch.cat((given["attention_mask"], torch.ones(2, more, dtype=torch.long)), 1)
    seen = torch.ones(2, ids.shape[1], 1, 1, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask, "cross_attention_mask": seen}


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("beams", [1, 2])
def test_exact_codes_answer_as_its_own_cache_in_later_turns(
    model: PreTrainedModel, beams: int
) -> None:
    given = with_picture(model)
    caches = [DynamicCache(config=model.config), QuantizedCache(model, EXACT)]
    first = [answer(model, given, cache, num_beams=beams) for cache in caches]
    assert torch.equal(first[0].sequences, first[1].sequences)
    if beams == 1:
        caches[1].reorder_cache(torch.tensor([1, 0]))
        caches[1].reorder_cache(torch.tensor([1, 0]))
        later = next_turn(given, first[0].sequences)
        own, ours = (answer(model, later, cache) for cache in caches)
        assert logit_error(torch.stack(ours.logits), torch.stack(own.logits)) < LOGIT_TOLERANCE


def test_a_saved_cache_goes_on_as_the_one_in_memory(model: PreTrainedModel, tmp_path: Path) -> None:
    given, cache = with_picture(model, 40), QuantizedCache(model, KIVI)
    later = next_turn(given, answer(model, given, cache).sequences)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    pictures = sum(x.nbytes for layer in (1, 3) for x in vars(cache.layers[layer]).values()
                   if isinstance(x, Tensor))  # fmt: skip
    assert loaded.memory().state_bytes == cache.memory().state_bytes == pictures > 0
    first, second = (answer(model, later, each) for each in (cache, loaded))
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))
    cache.reset()
    assert not cache.layers[1].is_initialized


def test_a_dense_cache_of_such_a_model_is_not_absorbed(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="keep states or pictures"):
        QuantizedCache(model, KIVI).absorb(DynamicCache(config=model.config))
