"""Windows over the answer alone, which spare the prompt (Unlimited OCR)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from shrunk import tiny_config
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.facts import model_facts

from families import LOGIT_TOLERANCE, logit_error

pytestmark = pytest.mark.skipif(
    "unlimited_ocr" not in CONFIG_MAPPING, reason="this transformers has no such type"
)
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8))
EXACT = CacheSpec(visual="text", text=STREAM, sink=2, recent=3)
MODES: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"prefill_chunk_size": 8}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = tiny_config("unlimited_ocr")
    config.text_config.sliding_window = 4
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompts() -> dict[str, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(2, 280, (2, 20))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer(model: PreTrainedModel, given: dict[str, Tensor], cache: Any, **more: Any) -> Any:
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**given, past_key_values=cache, max_new_tokens=12, **settings, **more)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_exact_codes_answer_as_its_own_cache(model: PreTrainedModel, mode: dict[str, Any]) -> None:
    given = prompts()
    caches = [DynamicCache(config=model.config), QuantizedCache(model, EXACT)]
    first = [answer(model, given, cache, **mode) for cache in caches]
    assert torch.equal(first[0].sequences, first[1].sequences)
    assert caches[0].layers[0].keys.shape[2] == 3  # of the answer, next to its prompt
    if mode:
        return
    ids = torch.cat((first[0].sequences, torch.full((2, 3), 9)), 1)
    more = torch.ones(2, ids.shape[1] - 20, dtype=torch.long)
    later = {"input_ids": ids, "attention_mask": torch.cat((given["attention_mask"], more), 1)}
    second = [answer(model, later, cache) for cache in (caches[0], copy.deepcopy(caches[1]))]
    ours, own = (torch.stack(out.logits) for out in reversed(second))
    assert logit_error(ours, own) < LOGIT_TOLERANCE
    caches[1].reset()
    again = answer(model, given, caches[1])
    assert torch.equal(again.sequences, first[0].sequences)


@pytest.mark.usefixtures("exact_codec")
def test_a_padded_row_answers_as_alone(model: PreTrainedModel) -> None:
    """Of its own cache, rows alone are right: with padding it looks up wrong places of its mask."""
    given = prompts()
    given["attention_mask"][1, :5] = 0
    ours = torch.stack(answer(model, given, QuantizedCache(model, EXACT)).logits)
    alone = {name: x[1:, 5:] for name, x in given.items()}
    own = torch.stack(answer(model, alone, DynamicCache(config=model.config)).logits)
    assert logit_error(ours[:, 1:], own) < LOGIT_TOLERANCE


def test_files_would_forget_where_the_prompt_ends(model: PreTrainedModel, tmp_path: Path) -> None:
    assert model_facts(model).spares_prompt
    cache = QuantizedCache(model, duotone.scheme("kivi", bits=2))
    with pytest.raises(ValueError, match="where a prompt ends"):
        cache.absorb(DynamicCache(config=model.config))
    answer(model, prompts(), cache)
    with pytest.raises(ValueError, match="where a prompt ends"):
        cache.save(tmp_path / "cache.safetensors")
