"""Caches of latents, which the model expands to K and V by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shrunk import tiny_model_of
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.facts import model_facts
from duotone.planning import plan
from duotone.planning.memory import attention_paths
from duotone.tools.slow_paths import SlowPathWarning

from families import LOGIT_TOLERANCE, logit_error

KIVI = duotone.scheme("kivi", bits=2)
DENSE = CacheSpec(visual="dense", text="dense")
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8))
EXACT = CacheSpec(visual=STREAM, text=STREAM, ranges="run", sink=2, recent=3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model_of("kimi_k25")


def padded(tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(2, 280, (2, tokens))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def answer(model: PreTrainedModel, given: dict[str, Tensor], cache: Any, **more: Any) -> Any:
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**given, past_key_values=cache, max_new_tokens=5, **settings, **more)


def next_turn(given: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    ids = torch.cat((sequences, torch.full((2, 4), 9)), 1)
    seen = torch.ones(2, ids.shape[1] - given["attention_mask"].shape[1], dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.cat((given["attention_mask"], seen), 1)}


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.filterwarnings("ignore:a step of a latent cache")
def test_exact_codes_answer_as_its_own_cache_after_every_operation(model: PreTrainedModel) -> None:
    given, own, ours = padded(30), DynamicCache(config=model.config), QuantizedCache(model, EXACT)
    for turn in range(3):
        answers = [answer(model, given, cache) for cache in (own, ours)]
        assert torch.equal(answers[0].sequences, answers[1].sequences)
        logits = [torch.stack(each.logits) for each in answers]
        assert logit_error(logits[1], logits[0]) < LOGIT_TOLERANCE
        given = next_turn(given, answers[0].sequences)
        if turn == 0:
            for cache in (own, ours):
                cache.crop(-2)
                cache.reorder_cache(torch.tensor([0, 1]))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
    padding = 5 * 40 * 4 * len(own.layers)
    assert ours.memory().dense_equivalent_bytes == held - padding


@pytest.mark.filterwarnings("ignore:a step of a latent cache")
def test_a_saved_cache_goes_on_as_the_one_in_memory(model: PreTrainedModel, tmp_path: Path) -> None:
    given, cache = padded(60), QuantizedCache(model, KIVI)
    later = next_turn(given, answer(model, given, cache).sequences)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    first, second = (answer(model, later, each) for each in (cache, loaded))
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))


def test_steps_say_that_they_dequantize_every_token() -> None:
    model = tiny_model_of("kimi_k25")
    with duotone.enable(model, DENSE), pytest.warns(SlowPathWarning, match="dequantizes every"):
        model.generate(**padded(30), max_new_tokens=3)


def test_a_plan_counts_both_parts_and_names_no_kernel(model: PreTrainedModel) -> None:
    shape = model_facts(model.config).shapes[0]
    assert (shape.kv_heads, shape.head_dims) == (1, (32, 8))
    planned = plan(model.config, KIVI, text_tokens=400)
    assert planned.dense_equivalent_bytes == 4 * 40 * 400 * 2
    assert {row["runs"] for row in attention_paths(model_facts(model.config), KIVI)} == {
        "reference"
    }


@pytest.mark.parametrize("name", ["calibquant", "duotone", "pyramidinfer-cache"])
def test_schemes_that_need_attention_of_ours_are_refused(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(ValueError, match="holds latents"):
        QuantizedCache(model, duotone.scheme(name))


def test_kernels_are_refused_by_name(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="impl='cuda' is not possible: the model expands"):
        QuantizedCache(model, KIVI, impl="cuda")
