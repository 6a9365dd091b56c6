"""Caches of models that cap their scores (PaliGemma 2); `test_own_windows` runs them."""

import pytest
import torch
from family_configs import WINDOWS, text_only
from transformers import AutoModelForCausalLM

import duotone
from duotone import QuantizedCache
from duotone.hf.model.facts import model_facts
from duotone.planning.memory import attention_paths

from families import LOGIT_TOLERANCE, inputs, logit_error, tiny_model

NAME = "paligemma2"
KIVI = duotone.scheme("kivi", bits=2)


def test_the_cap_counts_and_ours_keeps_it() -> None:
    model, given = tiny_model(NAME), inputs(NAME, [[3, "image", 9], [7]])
    mode = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    own = torch.stack(model.generate(**given, **mode).logits)
    with duotone.enable(model, duotone.scheme("dense")):
        ours = torch.stack(model.generate(**given, **mode).logits)
    assert logit_error(ours, own) < LOGIT_TOLERANCE
    layers = model.model.language_model.layers
    cap = layers[0].self_attn.attn_logit_softcapping
    try:
        for layer in layers:
            layer.self_attn.attn_logit_softcapping = None
        free = model.generate(**given, **mode).logits[0]
        with duotone.enable(model, KIVI), pytest.raises(NotImplementedError, match="as its config"):
            model.generate(**given, **mode)
    finally:
        for layer in layers:
            layer.self_attn.attn_logit_softcapping = cap
    assert logit_error(free, own[0]) > 0.1


@pytest.mark.parametrize("config", ["Gemma2Config", "VaultGemmaConfig"])
def test_language_models_alone_keep_the_cap(config: str) -> None:
    capped = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "head_dim": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(text_only(config, **capped, **WINDOWS)()).eval()
    model.set_attn_implementation("eager")
    given = {"input_ids": torch.randint(2, 280, (2, 40))}
    mode = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    mode |= {"eos_token_id": None, "pad_token_id": 0}
    own = torch.stack(model.generate(**given, **mode).logits)
    with duotone.enable(model, duotone.scheme("dense")):
        ours = torch.stack(model.generate(**given, **mode).logits)
    assert logit_error(ours, own) < LOGIT_TOLERANCE


def test_kernels_and_schemes_without_the_cap_are_refused() -> None:
    model = tiny_model(NAME)
    with pytest.raises(ValueError, match="impl='cuda' is not possible: scores are capped"):
        QuantizedCache(model, KIVI, impl="cuda")
    for name, what in (("calibquant", "tau"), ("pyramidinfer-cache", "evicts tokens by scores")):
        with pytest.raises(ValueError, match=what):
            QuantizedCache(model, duotone.scheme(name))
    assert {row["runs"] for row in attention_paths(model_facts(model), KIVI)} == {"reference"}
    assert "scores are capped" in duotone.supports(model, KIVI).graphs
