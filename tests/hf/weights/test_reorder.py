"""AIFS on whole models: two images at different places, padding, two turns with a KV cache."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import duotone
import duotone.hf.weights.reorder as door
from duotone.hf.weights.modality import announced
from duotone.hf.weights.reorder import reorder_always, visual_first

from exactly import FP32, FP64, assert_same, exact_norms, no_rounding, relative_error, rounding_as
from families import IMAGE, MULTIMODAL, inputs, new_exact_model, new_model, tiny_model

TURNS = ([[3, "image", 5, "image", 2], [6, "image", 4]], [[2, "image", 3], [1]])
# One makes its masks too late, and says so; of another's pictures tokens are
# looked up; Phi-4's decoder takes pictures itself.
UNORDERED = ("aya_vision", "chameleon", "phi4_multimodal")

# These compute three axes themselves for a first turn; for later ones their caller does.
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_vl_moe", "glm4v_moe")


def later_positions(seen):
    """[3, batch, tokens]: axes that differ, as those of images do."""
    place = (seen.cumsum(1) - 1).clamp(min=0)
    return torch.stack([place, place // 2, place % 5])


def model_of(name):
    model = new_exact_model(name)
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


@pytest.mark.parametrize("name", [name for name in MULTIMODAL if name not in UNORDERED])
def test_two_turns_with_images_padding_and_a_cache(name):
    model = model_of(name)
    expected = two_turns(model, name)
    with visual_first(model):
        ours = two_turns(model, name)
    for turn, kept in zip(ours, expected, strict=True):
        assert_same(turn, kept, FP64)
    assert_same(two_turns(model, name)[1], expected[1], 0)


def test_eager_attention_gets_an_additive_mask():
    model = new_model("internvl")
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
    rules = {
        "llama": "has no visual tokens",
        "chameleon": "has no decoder apart",
        "qwen3_5": "has layers whose state follows from the order",
    }
    for name, rule in rules.items():
        with pytest.raises(ValueError, match=f"'{name}' {rule}"), visual_first(tiny_model(name)):
            pass
    model = model_of("internvl")
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="takes a mask"), visual_first(model):
        pass


def last_logits(model, name, cache):
    """Logits of a prompt of two rows, one padded, after those that the cache holds."""
    given = inputs(name, TURNS[1], 1)
    real = given["attention_mask"]
    turns = int(cache.get_seq_length()) // real.shape[1] + 1
    given["attention_mask"] = real.repeat(1, turns)
    with torch.no_grad():
        return model(**given, past_key_values=cache, use_cache=True).logits[real.bool()]


def caches_of(name):
    model = tiny_model(name)
    text = model.config.get_text_config()
    # Visual tokens are among the judges, which weigh by their place.
    evict = duotone.Eviction(keep=0.4, window=0.7, newest_weight=4)
    evicts = duotone.scheme("vl-cache").replace(evict=evict)
    return {
        "grows": lambda: DynamicCache(),
        "fixed size": lambda: StaticCache(config=text, max_cache_len=64),
        "sliding": lambda: DynamicCache(config=text),
        "few bits": lambda: duotone.QuantizedCache(model, duotone.scheme("kivi", bits=2)),
        "evicts": lambda: duotone.QuantizedCache(model, evicts),
    }


CACHES = [("internvl", kind) for kind in ("grows", "fixed size", "few bits", "evicts")]
CACHES += [("gemma3", "sliding"), ("llava", "few bits")]


@pytest.mark.parametrize(("name", "kind"), CACHES)
def test_caches_hold_the_prompt_in_its_own_order(name, kind):
    model, make = tiny_model(name), caches_of(name)[kind]
    plain, ours = make(), make()
    wanted = [last_logits(model, name, plain) for _ in range(2)]
    with visual_first(model):
        found = [last_logits(model, name, ours) for _ in range(2)]
    for turn, kept in zip(found, wanted, strict=True):
        assert_same(turn, kept, 1e-4)
    # One went on where the other stopped, whatever the order inside each step.
    assert_same(last_logits(model, name, ours), last_logits(model, name, plain), 1e-4)


def test_a_cache_from_elsewhere_or_cut_is_continued():
    model, wanted = tiny_model("internvl"), DynamicCache()
    last_logits(model, "internvl", wanted)
    length = wanted.get_seq_length()
    second = last_logits(model, "internvl", wanted)
    cache = DynamicCache()
    last_logits(model, "internvl", cache)
    with visual_first(model):
        assert_same(last_logits(model, "internvl", cache), second, 1e-5)
        cache.crop(-length)
        assert cache.get_seq_length() == length
        assert_same(last_logits(model, "internvl", cache), second, 1e-5)


@pytest.mark.parametrize("scheme", [None, "kivi"])
def test_beams_write_the_same_tokens(scheme):
    model, given = tiny_model("internvl"), inputs("internvl", TURNS[0], 0)
    how = dict(max_new_tokens=5, do_sample=False, num_beams=3)
    spec = scheme and duotone.scheme(scheme, bits=2)
    found = []
    for order in (nullcontext(), visual_first(model)):
        few = duotone.enable(model, spec) if spec else nullcontext()
        with order, few:
            found.append(model.generate(**given, **how))
    assert torch.equal(*found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "how", [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}]
)
def test_generate_with_masks_and_chunks_of_its_own(how, attention):
    model, given = new_model("internvl"), inputs("internvl", [TURNS[0][0]], 0)
    model.set_attn_implementation(attention)
    wanted = model.generate(**given, max_new_tokens=6, do_sample=False)
    with visual_first(model):
        found = model.generate(**given, max_new_tokens=6, do_sample=False, **how)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["internvl", "qwen3_vl", "gemma3"])
def test_hidden_states_come_back_in_order(name, use_cache):
    model, given = tiny_model(name), inputs(name, TURNS[0], 0)
    real = given["attention_mask"].bool()
    how = dict(output_hidden_states=True, use_cache=use_cache)
    with torch.no_grad():
        wanted = model(**given, **how)
        with visual_first(model):
            found = model(**given, **how)
    assert len(found.hidden_states) == len(wanted.hidden_states) == 4
    for ours, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert_same(ours[real], theirs[real], 1e-4)
    assert (found.past_key_values is None) == (wanted.past_key_values is None)


def test_a_failed_step_leaves_the_cache_as_it_was():
    model, cache = tiny_model("internvl"), DynamicCache()

    def fails(*_):
        raise RuntimeError("out of memory")

    with visual_first(model):
        hook = model.get_decoder().layers[1].register_forward_pre_hook(fails)
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                last_logits(model, "internvl", cache)
        finally:
            hook.remove()
        assert "update" not in vars(cache)


def test_attention_weights_are_refused():
    model = new_model("internvl")
    model.set_attn_implementation("eager")
    with visual_first(model), pytest.raises(ValueError, match="in another order"):
        model(**inputs("internvl", TURNS[1], 1), output_attentions=True)


def test_embeddings_are_announced():
    model, given = tiny_model("internvl"), inputs("internvl", TURNS[0], 0)
    visual = given["input_ids"] == IMAGE
    mask, real = given["attention_mask"], given["attention_mask"].bool()
    with torch.no_grad():
        wanted = model(**given).logits[real]
        embeds = model.get_input_embeddings()(given["input_ids"])
        pictures = model.get_image_features(pixel_values=given["pixel_values"]).pooler_output
        embeds = embeds.masked_scatter(visual[..., None], pictures)
        with visual_first(model):
            with announced(model, visual):
                found = model(inputs_embeds=embeds, attention_mask=mask).logits[real]
            with pytest.raises(ValueError, match="must know its visual tokens"):
                model(inputs_embeds=embeds, attention_mask=mask)
    assert_same(found, wanted, 1e-4)


def test_nothing_is_left_on_the_model():
    model = new_model("internvl")
    parts = (model, model.base_model, model.get_decoder())

    def state():
        return [(len(m._forward_pre_hooks), len(m._forward_hooks), set(vars(m))) for m in parts]

    before = state()
    with visual_first(model), visual_first(model):
        assert len(parts[2]._forward_pre_hooks) == before[2][0] + 1
    assert state() == before


def test_sliding_windows_without_a_mask_of_the_model_are_refused():
    model = model_of("internvl")
    text = model.get_decoder().config
    text.layer_types = ["sliding_attention"] * 3
    with visual_first(model), pytest.raises(ValueError, match="sliding windows"):
        last_logits(model, "internvl", DynamicCache())
    with pytest.raises(ValueError, match="sliding windows"):
        reorder_always(model)
