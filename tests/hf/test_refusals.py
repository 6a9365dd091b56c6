"""What cannot be right raises, by name, and before any work is lost."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    T5Config,
    T5ForConditionalGeneration,
)

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec

from families import IMAGE, TEXT, inputs, tiny_model

VISUAL = CacheSpec(visual=KVSpec(TensorSpec(2), TensorSpec(2)))
TEXT_SPEC = KVSpec(TensorSpec(4, group=4), TensorSpec(4, along="channels"))


def test_text_only_model_under_a_visual_scheme_raises() -> None:
    with pytest.raises(ValueError, match=r"has none.*kivi"):
        QuantizedCache(tiny_model("llama"), VISUAL)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (DeepseekV2Config(), "latent"),
        (T5Config(), "encoder-decoder"),
        (Gemma2Config(**TEXT), "softcap"),
    ],
    ids=["mla", "encoder-decoder", "softcap"],
)
def test_unsupported_models_raise_by_name(config: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        duotone.hf.model_facts(config)


def test_a_name_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"got a str.*load_config"):
        duotone.plan("OpenGVLab/InternVL3-8B-hf", VISUAL, visual_tokens=1)


def test_bases_of_the_embedded_model_explain_themselves_first() -> None:
    """Not by the layers that they name and a shallower model does not have."""
    with pytest.raises(ValueError, match=r"belong to a model.*duotone calibrate"):
        QuantizedCache(tiny_model("internvl"), duotone.scheme("duotone-klt"))


def test_encoder_decoder_model_raises_before_any_change() -> None:
    config = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="encoder-decoder"), duotone.enable(model, VISUAL):
        pass
    assert "generate" not in vars(model)


def test_linear_attention_layers_raise() -> None:
    config = tiny_model("qwen2").config.__class__(**{**TEXT, "num_hidden_layers": 2})
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        duotone.hf.model_facts(config)


def test_custom_4d_mask_raises() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9]])
    n = given["input_ids"].shape[1]
    given["attention_mask"] = torch.ones(1, 1, n, n, dtype=torch.bool)
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(**given, past_key_values=QuantizedCache(model, VISUAL))


def test_an_inner_module_cannot_be_called_with_the_cache() -> None:
    model = tiny_model("llama")
    spec = CacheSpec(visual="dense", text=TEXT_SPEC)
    with pytest.raises(RuntimeError, match="outside a step"):
        model.model(torch.tensor([[5, 6]]), past_key_values=QuantizedCache(model, spec))


def test_a_step_that_broke_off_is_noticed() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9]])
    cache = QuantizedCache(model, VISUAL)
    hook = model.get_decoder().layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(KeyError):
        model(**given, past_key_values=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match="reached 1 of 3 layers"):
        cache.memory()


def _fail(*_: object) -> None:
    raise KeyError


def test_softcap_raises_inside_the_model() -> None:
    from duotone.hf.attention import duotone_attention
    from duotone.hf.lazy import LazyStates

    model = tiny_model("internvl")
    cache = QuantizedCache(model, VISUAL)
    lazy = LazyStates(cache.layers[0], "key", torch.zeros(3, 2, 1, 16))
    with pytest.raises(NotImplementedError, match="softcap"):
        duotone_attention(model, torch.zeros(3, 4, 1, 16), lazy, lazy, None, softcap=30.0)


def test_non_finite_states_raise_and_say_where() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9]])
    given["pixel_values"][:] = float("nan")
    with pytest.raises(ValueError, match="only finite values"):
        model(**given, past_key_values=QuantizedCache(model, VISUAL))


def test_untested_families_pass_with_a_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Phi3Config

    fields = {**TEXT, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(Phi3Config(**fields))
    facts = duotone.hf.model_facts(model)
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (1, 2, 16)
    assert not facts.is_multimodal
    assert IMAGE not in facts.visual_token_ids
