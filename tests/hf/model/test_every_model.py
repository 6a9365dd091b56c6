"""Every model type that transformers knows with a language head, judged by its config alone."""

import re
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import duotone
from duotone.hf.model.facts import TESTED_FAMILIES, ModelFacts
from duotone.hf.versions import BROKEN

MODEL_TYPES = sorted(
    {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
)
# Which token stands for a picture's is in the vocabulary, or in checkpoints alone, which a default
# config has not; and it names no layers of attention.
NEED_MORE = {"bamba", "chameleon", "emu3", "granitemoehybrid", "minicpmv4_6", "minicpmv4_7"}


def default_config(model_type: str) -> PreTrainedConfig | None:
    """The type's config as its class has it, if it can be made of nothing."""
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:  # transformers' own validation, whose errors differ by version
        return None


def verdict(config: PreTrainedConfig) -> ModelFacts | str:
    """The facts, or the words of a refusal; any other exception is the test's."""
    try:
        return duotone.hf.model_facts(config)
    except ValueError as refusal:
        return str(refusal)


def test_each_is_supported_or_refused_by_name() -> None:
    configs = [config for name in MODEL_TYPES if (config := default_config(name)) is not None]
    assert len(configs) > 0.95 * len(MODEL_TYPES)
    refused = set()
    for config in configs:
        found, name = verdict(config), config.model_type
        if isinstance(found, str):
            assert repr(name) in found
            refused.add(name)
        else:
            assert found.layers >= 1, name
            sizes = ((x.q_heads, x.kv_heads, *x.head_dims) for x in found.shapes)
            assert min(map(min, sizes)) >= 1, name
            assert found.visual_token_ids or not found.takes_pictures, name
    expected = NEED_MORE | set(BROKEN.get(transformers.__version__, ()))
    assert refused & set(TESTED_FAMILIES) == expected & set(MODEL_TYPES)
    assert refused >= {"blip-2", "git", "kosmos-2"}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("diffllama", "differential attention"),
        ("pi0", r"has no \['num_hidden_layers', 'num_attention_heads'"),
        ("rwkv", r"has no \['num_attention_heads'\]"),
        ("chameleon", r"none of \('image_token_id', 'video_token_id'\).*visual_mask"),
        ("git", r"those of 'git' come before its ids"),
        ("deepseek_v2", "latent"),
        ("t5", "encoder-decoder"),
        ("minimax", "linear_attention"),
        ("bamba", "some layers must have K and V"),
    ],
)
def test_what_rules_a_model_out_is_said(model_type: str, why: str) -> None:
    refusal = verdict(CONFIG_MAPPING[model_type]())
    assert isinstance(refusal, str)
    assert re.search(why, refusal)


def test_a_language_model_inside_may_be_an_encoder_decoder() -> None:
    config = CONFIG_MAPPING["instructblip"](text_config={"model_type": "t5"}, image_token_index=9)
    assert "encoder-decoder" in verdict(config)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("cross_attention_layers", [3], "visual tokens in cross attention"),
        ("attn_logit_softcapping", 50.0, "softcapped scores"),
        ("n_recurrent_loops", 2, "layers run several times a token"),  # Dory
    ],
)
def test_fields_of_attention_are_refused_of_unknown_families(
    field: str, value: Any, why: str
) -> None:
    assert why in verdict(CONFIG_MAPPING["llama"](**{field: value}))


def test_idefics_is_refused_where_it_changes_cached_keys() -> None:
    config = CONFIG_MAPPING["idefics"](qk_layer_norms=True)
    assert "between the cache and its attention" in verdict(config)
    assert not verdict(CONFIG_MAPPING["idefics"]()).is_multimodal


def test_attributes_that_vary_by_layer_are_refused() -> None:
    """As such configs raise: at the first read, and no AttributeError."""

    class ByLayer(CONFIG_MAPPING["llama"]):
        per_layer_attributes = frozenset({"sliding_window", "intermediate_size"})

        def __getattribute__(self, name: str) -> object:
            if name == "sliding_window":
                raise RuntimeError("ambiguous")
            return super().__getattribute__(name)

    config = object.__new__(ByLayer)
    config.__dict__.update(vars(CONFIG_MAPPING["llama"]()))
    with pytest.raises(ValueError, match=r"'llama' these vary by layer: \['sliding_window'\]"):
        duotone.hf.model_facts(config)


def test_one_head_of_keys_is_one() -> None:
    config = CONFIG_MAPPING["gpt_bigcode"](multi_query=True)
    assert duotone.hf.model_facts(config).shape.kv_heads == 1
