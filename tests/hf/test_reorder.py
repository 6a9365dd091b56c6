"""AIFS on whole models: two images at different places, padding, two turns with a KV cache."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import duotone.hf.reorder as door
from duotone.hf.reorder import visual_first

from exactly import FP32, FP64, assert_same, exact_norms, no_rounding, relative_error, rounding_as
from families import MULTIMODAL, inputs, tiny_model

TURNS = (
    [[3, "image", 5, "image", 2], [6, "image", 4]],
    [[2, "image", 3], [1]],
)


# These compute three axes themselves for a first turn; for later ones their caller does.
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


def later_positions(seen):
    """[3, batch, tokens]: axes that differ, as those of images do."""
    place = (seen.cumsum(1) - 1).clamp(min=0)
    return torch.stack([place, place // 2, place % 5])


def model_of(name):
    model = deepcopy(tiny_model(name)).double()
    return model if name == "gemma3" else exact_norms(model)


def double(given, cast=Tensor.double):
    return {k: cast(v) if v.is_floating_point() else v for k, v in given.items()}


def two_turns(model, name, cast=Tensor.double):
    """Logits of two turns at real tokens; the second one's shorter row is padded in the middle."""
    cache, seen, found = DynamicCache(), torch.empty(2, 0, dtype=torch.long), []
    for seed, prompts in enumerate(TURNS):
        given = double(inputs(name, prompts, seed), cast)
        new = given["attention_mask"]
        seen = torch.cat([seen, new], dim=1)
        given |= dict(attention_mask=seen, past_key_values=cache, use_cache=True)
        if seed and name in MROPE:
            given["position_ids"] = later_positions(seen)[..., -new.shape[1] :]
        with torch.no_grad(), rounding_as(model.dtype):
            found.append(model(**given).logits[new.bool()])
    return found


@pytest.mark.parametrize("name", MULTIMODAL)
def test_two_turns_with_images_padding_and_a_cache(name):
    model = model_of(name)
    expected = two_turns(model, name)
    with visual_first(model):
        ours = two_turns(model, name)
    for turn, kept in zip(ours, expected, strict=True):
        assert_same(turn, kept, FP64)
    assert_same(two_turns(model, name)[1], expected[1], 0)


def test_eager_attention_gets_an_additive_mask():
    model = deepcopy(tiny_model("internvl"))
    model.set_attn_implementation("eager")
    expected = two_turns(model, "internvl", Tensor.float)
    with visual_first(model):
        ours = two_turns(model, "internvl", Tensor.float)
    for turn, kept in zip(ours, expected, strict=True):
        assert_same(turn, kept, FP32)


@pytest.mark.parametrize("name", ["internvl", "qwen2_vl", "qwen3_vl"])
def test_generation_writes_the_same_tokens(name):
    model, given = model_of(name), double(inputs(name, TURNS[0], 0))
    how = dict(max_new_tokens=6, do_sample=False)
    with no_rounding():
        expected = model.generate(**given, **how)
        with visual_first(model):
            ours = model.generate(**given, **how)
    assert torch.equal(ours, expected)
    assert ours.shape[1] > given["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen2_vl", "take_positions"),
        ("internvl", "visibility"),
        ("internvl", "inverse"),
        ("gemma3", "take_mask"),
    ],
)
def test_every_permutation_matters(name, part, monkeypatch):
    broken = {
        "take_positions": lambda positions, order: positions,
        "inverse": lambda order: order,
        "take_mask": lambda mask, queries, keys: mask,
        "visibility": lambda queries, keys, real: real[:, None].expand(-1, queries.shape[1], -1),
    }
    model = model_of(name)
    expected = two_turns(model, name)
    monkeypatch.setattr(door, part, broken[part])
    with visual_first(model):
        ours = two_turns(model, name)
    assert relative_error(ours[0], expected[0]) > 1e-6


def test_deepstack_goes_to_the_moved_tokens(monkeypatch):
    model = model_of("qwen3_vl")
    expected = two_turns(model, "qwen3_vl")
    plain = door.take
    monkeypatch.setattr(door, "take", lambda x, o: x if x.dtype == torch.bool else plain(x, o))
    with visual_first(model):
        assert relative_error(two_turns(model, "qwen3_vl")[0], expected[0]) > 1e-6


def test_what_cannot_be_reordered_is_refused():
    with (
        pytest.raises(ValueError, match="'llama' has no visual tokens"),
        visual_first(tiny_model("llama")),
    ):
        pass
    model = model_of("internvl")
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="takes a mask"), visual_first(model):
        pass


def cache_with(model, name, cache):
    given = double(inputs(name, TURNS[1], 1))
    with torch.no_grad():
        model(**given, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("name", ["internvl", "gemma3"])
def test_caches_that_do_not_just_grow_are_refused(name):
    model = model_of(name)
    text = model.config.get_text_config()
    static = StaticCache(config=text, max_cache_len=64)
    cache = DynamicCache(config=text) if name == "gemma3" else static
    with visual_first(model), pytest.raises(ValueError, match="a cache that only grows"):
        cache_with(model, name, cache)


def test_a_cache_from_elsewhere_is_refused():
    model, cache = model_of("internvl"), DynamicCache()
    cache_with(model, "internvl", cache)
    with visual_first(model), pytest.raises(ValueError, match="are not those of the last step"):
        cache_with(model, "internvl", cache)


def test_sliding_windows_without_a_mask_of_the_model_are_refused():
    model = model_of("internvl")
    text = model.get_decoder().config
    text.layer_types = ["sliding_attention"] * 3
    with visual_first(model), pytest.raises(ValueError, match="sliding windows"):
        cache_with(model, "internvl", DynamicCache())
