"""Layers whose indexer chooses the tokens that a query sees (Qwen4-Exp)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from shrunk import tiny_model_of
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from held import reachable

from families import LOGIT_TOLERANCE, logit_error

pytestmark = pytest.mark.skipif(
    "qwen4_exp" not in CONFIG_MAPPING, reason="this transformers has no such type"
)
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8))
EXACT = CacheSpec(visual="text", text=STREAM, sink=2, recent=3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model_of("qwen4_exp")


def prompts() -> dict[str, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(3, 280, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def answer(model: PreTrainedModel, given: dict[str, Tensor], cache: Any, **more: Any) -> Any:
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**given, past_key_values=cache, max_new_tokens=5, **settings, **more)


def own_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=str)
def test_exact_codes_answer_as_its_own_cache(model: PreTrainedModel, mode: dict[str, Any]) -> None:
    given, caches = prompts(), [own_cache(model), QuantizedCache(model, EXACT)]
    first = [answer(model, given, cache, **mode) for cache in caches]
    assert torch.equal(first[0].sequences, first[1].sequences)
    if mode:
        return
    ids = torch.cat((first[0].sequences, torch.full((2, 3), 9)), 1)
    more = torch.ones(2, ids.shape[1] - 30, dtype=torch.long)
    later = {"input_ids": ids, "attention_mask": torch.cat((given["attention_mask"], more), 1)}
    second = [answer(model, later, cache) for cache in (caches[0], copy.deepcopy(caches[1]))]
    own, ours = (torch.stack(out.logits) for out in second)
    assert logit_error(ours, own) < LOGIT_TOLERANCE
    caches[1].reset()
    assert torch.equal(answer(model, given, caches[1]).sequences, first[0].sequences)


def test_memory_counts_what_an_indexer_keeps(model: PreTrainedModel) -> None:
    given = {"input_ids": prompts()["input_ids"].clamp_min(3)}
    own, ours = own_cache(model), QuantizedCache(model, duotone.scheme("dense"))
    for cache in (own, ours):
        answer(model, given, cache)
    held = sum(tensor.nbytes for tensor in reachable(own).values())
    assert ours.memory().dense_equivalent_bytes == held
    assert ours.memory().state_bytes > sum(x.nbytes for x in ours.timeline.own.tensors.values()) > 0


def test_files_and_eviction_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = QuantizedCache(model, duotone.scheme("kivi", bits=2))
    answer(model, prompts(), cache)
    with pytest.raises(ValueError, match="keys of an indexer"):
        cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="choose among all tokens"):
        QuantizedCache(model, duotone.scheme("pyramidinfer-cache"))
