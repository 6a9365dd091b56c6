"""Impossible requests raise, by name, before any work is lost."""

from functools import partial
from typing import Any

import pytest
import torch
from family_configs import TEXT
from transformers import (
    AutoModelForCausalLM,
    GitConfig,
    GptOssConfig,
    MoshiConfig,
    PreTrainedModel,
)

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.cache.pair import PackedPair
from duotone.hf.cache.states import LazyStates
from duotone.hf.model import support
from duotone.quant.checks import NOT_FINITE, STREAM_NOT_FINITE, is_finite

from families import IMAGE, inputs, new_model, tiny_model

VISUAL = CacheSpec(visual=KVSpec(TensorSpec(2), TensorSpec(2)))
TEXT_SPEC = KVSpec(TensorSpec(4, group=4), TensorSpec(4, along="channels"))


def test_text_only_model_under_a_visual_scheme_raises() -> None:
    with pytest.raises(ValueError, match=r"has none.*kivi"):
        QuantizedCache(tiny_model("llama"), VISUAL)


def test_a_name_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"got a str.*load_config"):
        duotone.plan("OpenGVLab/InternVL3-8B-hf", VISUAL, visual_tokens=1)


def test_bases_of_the_embedded_model_explain_themselves_first() -> None:
    """Not by the layers that they name and a shallower model does not have."""
    with pytest.raises(ValueError, match=r"belong to a model.*duotone calibrate"):
        QuantizedCache(tiny_model("internvl"), duotone.scheme("duotone-klt"))


def test_a_window_without_a_mask_raises() -> None:
    """Moshi's own cache forgets old tokens, and nothing else hides them."""
    fields = {
        k: v for k, v in TEXT.items() if k not in ("intermediate_size", "num_key_value_heads")
    }
    model = AutoModelForCausalLM.from_config(
        MoshiConfig(**fields, ffn_dim=96, sliding_window=8, audio_encoder_config={})
    )
    with pytest.raises(ValueError, match="'moshi' has a sliding window but makes no mask"):
        QuantizedCache(model, CacheSpec(visual="dense", text="dense"))


@pytest.mark.parametrize(
    "door", [duotone.supports, partial(duotone.plan, text_tokens=64), QuantizedCache]
)
def test_learned_sinks_are_refused_before_any_work(door: Any) -> None:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
    config = GptOssConfig(**{**TEXT, "num_hidden_layers": 2, **more})
    model, spec = AutoModelForCausalLM.from_config(config), duotone.scheme("kivi", bits=2)
    if door is duotone.supports:
        assert "'gpt_oss' has them in ['GptOssAttention']" in door(model, spec).cache
        return
    with pytest.raises(ValueError, match="no learned sinks; 'gpt_oss' has them"):
        door(model, spec)


@pytest.fixture
def without_ids() -> PreTrainedModel:
    """A model whose config does not name its placeholders."""
    model = new_model("internvl")
    vars(model.config)["image_token_id"] = None  # past the check of its type
    return model


@pytest.mark.parametrize("spec", ["duotone-mixed", "kivi", "duotone", "dense"])
def test_pictures_at_unknown_places_raise(without_ids: PreTrainedModel, spec: str) -> None:
    given = {"model": without_ids, "spec": duotone.scheme(spec)}
    with pytest.raises(ValueError, match=r"'internvl' takes pictures.*visual_mask"):
        QuantizedCache(**given)
    with pytest.raises(ValueError, match=r"'internvl' takes pictures"), duotone.enable(**given):
        pass


def test_a_mask_says_where_pictures_are(without_ids: PreTrainedModel) -> None:
    given = inputs("internvl", [[3, "image", 9], ["image", 12]])
    places = given["input_ids"] == IMAGE
    embeds = {
        "inputs_embeds": without_ids.get_input_embeddings()(given["input_ids"]),
        "attention_mask": given["attention_mask"],
    }
    cache = QuantizedCache(without_ids, VISUAL, visual_mask=places)
    without_ids(**embeds, past_key_values=cache)
    assert cache.ledger.state.visual.lengths.tolist() == [4, 4]
    question = torch.tensor([[5, 6, 7]] * 2)
    with pytest.raises(ValueError, match=r"tokens 18 to 20 lie past.*cache\.visual_mask"):
        without_ids(question, past_key_values=cache)
    cache.visual_mask = torch.cat([places, torch.zeros(2, 3, dtype=torch.bool)], 1)
    without_ids(question, past_key_values=cache)
    assert cache.get_seq_length() == 21


def test_a_mask_that_ends_within_a_step_raises() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9]])
    cache = QuantizedCache(model, VISUAL, visual_mask=given["input_ids"][:, :5] == IMAGE)
    with pytest.raises(ValueError, match="cover every step that it begins in, tokens 0 to 17"):
        model(**given, past_key_values=cache)


def test_pictures_beside_the_ids_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT, which is refused by name, puts a picture's tokens in front of the text's."""
    monkeypatch.setattr(support, "PREFIX_FAMILIES", ())
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    vision |= dict(num_attention_heads=2, image_size=16, patch_size=4)
    fields = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
    model = AutoModelForCausalLM.from_config(GitConfig(vision_config=vision, **fields))
    ids = torch.tensor([[5, 6, 7]])
    cache = QuantizedCache(
        model, CacheSpec(visual="dense", text="dense"), visual_mask=torch.zeros_like(ids)
    )
    with pytest.raises(ValueError, match="a step of 3 tokens must give each of them one K and V"):
        model(ids, pixel_values=torch.randn(1, 3, 16, 16), past_key_values=cache)


def test_values_that_a_model_changes_after_its_cache_raise() -> None:
    from duotone.hf.cache.attention import duotone_attention

    model = tiny_model("internvl")
    cache = QuantizedCache(model, VISUAL)
    states = torch.zeros(3, 2, 1, 16)
    lazy = LazyStates(cache.timeline, 0, "key", states, 1)
    for key, value in ((lazy, states), (states, lazy)):
        with pytest.raises(NotImplementedError, match="changes K or V between"):
            duotone_attention(model, torch.zeros(3, 4, 1, 16), key, value, None)


def test_another_attention_does_not_calibrate_scores() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9]])
    cache = QuantizedCache(model, VISUAL.replace(tau=(0.0, 1.0)))
    model(**given, past_key_values=cache)
    states = LazyStates(cache.timeline, 0, "key", torch.zeros(1, 2, 1, 16), cache.length)
    with pytest.raises(NotImplementedError, match="calibrates scores"):
        states + 0


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


def test_a_softcap_that_the_config_does_not_name_raises_inside_the_model() -> None:
    from duotone.hf.cache.attention import duotone_attention

    model = tiny_model("internvl")
    cache = QuantizedCache(model, VISUAL)
    lazy = LazyStates(cache.timeline, 0, "key", torch.zeros(3, 2, 1, 16), 1)
    with pytest.raises(NotImplementedError, match="softcap"):
        duotone_attention(model, torch.zeros(3, 4, 1, 16), lazy, lazy, None, softcap=30.0)


def test_numbers_that_a_kernel_found_bad_show_at_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels put their checks off; the cache is then of no use."""
    model, given = new_model("internvl"), inputs("internvl", [[4, "image", 9]])
    pack = PackedPair.pack

    def found_bad(*args: Any) -> PackedPair:
        assert is_finite(torch.tensor(float("nan")), NOT_FINITE)
        return pack(*args)

    monkeypatch.setattr(PackedPair, "pack", found_bad)
    cache = QuantizedCache(model, VISUAL)
    with torch.no_grad():
        with pytest.raises(ValueError, match="only finite values"):
            model(**given, past_key_values=cache)
        with pytest.raises(RuntimeError, match="reached 0 of"):
            model(input_ids=given["input_ids"][:, -1:], past_key_values=cache)


def test_groups_that_leave_at_a_decode_step_put_their_checks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups leave before the first layer runs; the step raises at its end."""
    model, pack, found = new_model("llama"), PackedPair.pack, []

    def found_bad(*args: Any) -> PackedPair:
        assert is_finite(torch.tensor(float("nan")), STREAM_NOT_FINITE)
        found.append(args)
        return pack(*args)

    monkeypatch.setattr(PackedPair, "pack", found_bad)
    cache = QuantizedCache(model, CacheSpec(visual="text", text=TEXT_SPEC, recent=4))
    with torch.no_grad():
        model(torch.tensor([range(5, 11)]), past_key_values=cache)
        one = torch.tensor([[7]])
        model(one, past_key_values=cache)
        assert not found
        model(one, past_key_values=cache)
        with pytest.raises(ValueError, match="of the text stream"):
            model(one, past_key_values=cache)
        assert len(found) == len(cache.timeline.stores)
        with pytest.raises(RuntimeError, match="reached 0 of"):
            model(one, past_key_values=cache)
