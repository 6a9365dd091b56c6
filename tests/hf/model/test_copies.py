"""Deep copies of attached models are clean models; caches are copied deeply or not at all."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import duotone
from duotone import QuantizedCache

from families import inputs, tiny_model

KIVI = duotone.scheme("kivi").replace(recent=9)
FAMILIES = pytest.mark.parametrize("name", ["llama", "internvl"])
ONES_OF_OURS = ("generate", "__deepcopy__")


def model_of(name: str, attention: str = "sdpa") -> PreTrainedModel:
    # Anew: after another test has asked for hidden states, transformers leaves hooks on a model.
    model = tiny_model.__wrapped__(name)
    model.set_attn_implementation(attention)
    return model


def hooks(model: nn.Module) -> int:
    kinds = [name for name in vars(model) if "hooks" in name]
    return sum(len(getattr(model, name)) for name in kinds)


def answer(model: PreTrainedModel, name: str) -> torch.Tensor:
    return model.generate(**inputs(name, [[20]]), max_new_tokens=20, do_sample=False)


def check_clean(clone: PreTrainedModel, name: str, attention: str) -> None:
    assert clone.config.get_text_config(decoder=True)._attn_implementation == attention
    assert hooks(clone) == 0
    assert not any(own in vars(clone) for own in ONES_OF_OURS)
    again = pickle.loads(pickle.dumps(clone))
    assert torch.equal(answer(again, name), answer(clone, name))


@FAMILIES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_copy_made_inside_a_block_is_a_clean_model(name: str, attention: str) -> None:
    model = model_of(name, attention)
    before = answer(model, name)
    with duotone.enable(model, KIVI):
        clone = copy.deepcopy(model)
        check_clean(clone, name, attention)
        assert hooks(model) > 0
        assert model.config.get_text_config(decoder=True)._attn_implementation == "duotone"
    check_clean(clone, name, attention)
    check_clean(model, name, attention)
    assert torch.equal(answer(clone, name), before)
    assert not any(a is b for a, b in zip(model.parameters(), clone.parameters(), strict=True))


def test_a_copy_made_beside_a_cache_is_a_clean_model() -> None:
    model = model_of("llama")
    cache = QuantizedCache(model, KIVI)
    clone = copy.deepcopy(model)
    check_clean(clone, "llama", "sdpa")
    cache.detach()
    assert "__deepcopy__" not in vars(model)
    check_clean(copy.deepcopy(model), "llama", "sdpa")


def test_a_copy_of_what_holds_a_model_holds_a_clean_one() -> None:
    model = model_of("llama")
    holder = nn.ModuleDict({"one": model, "other": model})
    with duotone.enable(model, KIVI):
        clone = copy.deepcopy(holder)
    assert clone["one"] is clone["other"]
    check_clean(clone["one"], "llama", "sdpa")


def parts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    attention = text.layers[1].self_attn
    return {"base": model.model, "text": text, "layer": text.layers[1], "attention": attention}


@FAMILIES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("part", ["base", "text", "layer", "attention"])
def test_a_copy_of_a_part_is_a_clean_part(name: str, attention: str, part: str) -> None:
    model = model_of(name, attention)
    with duotone.enable(model, KIVI):
        cache = QuantizedCache(model, KIVI)
        clone = copy.deepcopy(parts_of(model)[part])
        cache.detach()
    for module in clone.modules():
        assert "__deepcopy__" not in vars(module)
        if "config" in vars(module):
            text = module.config.get_text_config(decoder=True)
            assert text._attn_implementation == attention
    pickle.loads(pickle.dumps(clone))
    assert not any("__deepcopy__" in vars(module) for module in model.modules())
    assert model.config.get_text_config(decoder=True)._attn_implementation == attention


def test_a_copied_part_runs_alone() -> None:
    model, ids = model_of("llama"), torch.tensor([[3, 5, 8]])
    with duotone.enable(model, KIVI), torch.no_grad():
        clone = copy.deepcopy(model.model)
        expected = model.model(ids).last_hidden_state
        model.model.embed_tokens.weight.zero_()
        assert torch.equal(clone(ids).last_hidden_state, expected)


def test_parts_with_caches_of_their_own_are_copied_clean() -> None:
    model = model_of("llama", "eager")
    caches = [QuantizedCache(model, KIVI), QuantizedCache(model.model, KIVI)]
    for _ in range(2):
        for clone in (copy.deepcopy(model), copy.deepcopy(model.model)):
            assert clone.config._attn_implementation == "eager"
            assert hooks(clone) == hooks(clone.base_model) == 0
        caches.pop().detach()
    assert not any("__deepcopy__" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "eager"


def test_a_part_cannot_be_pickled_inside_a_block() -> None:
    model = model_of("llama")
    with duotone.enable(model, KIVI), pytest.raises(TypeError, match="leave the enable block"):
        pickle.dumps(model.model.layers[0])


def test_a_copy_runs_no_compiled_call_of_the_first_model() -> None:
    model, ran = model_of("llama"), []
    model.forward = torch.compile(model.forward, backend=lambda graph, _: graph.forward)
    model._compiled_call = torch.compile(model.__call__, backend="eager")
    compiled = model.forward
    with duotone.enable(model, KIVI):
        clone = copy.deepcopy(model)
    assert model.forward is compiled
    assert not {"forward", "_compiled_call", "_last_compile_config"} & set(vars(clone))
    model.register_forward_pre_hook(lambda *_: ran.append("first"))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert torch.isfinite(answer(clone, "llama")).all()
    assert torch.isfinite(clone(torch.ones(1, 3).long()).logits).all()
    assert ran == []


def test_a_copy_keeps_what_is_not_ours() -> None:
    model, heard = model_of("llama"), []
    model.register_forward_pre_hook(lambda module, args: heard.append(module))
    plain = model.generate
    model.generate = lambda *args, **kwargs: plain(*args, **kwargs)
    own = model.generate
    with duotone.enable(model, KIVI):
        clone = copy.deepcopy(model)
    assert hooks(clone) == 1
    clone(torch.ones(1, 3).long())
    assert heard == [clone]
    assert model.generate is own
    assert "generate" in vars(clone)


def test_a_copy_has_blocks_of_its_own() -> None:
    model = model_of("llama")
    with duotone.enable(model, KIVI) as outer:
        clone = copy.deepcopy(model)
        with duotone.enable(clone, KIVI) as inner:
            first = answer(clone, "llama")
        check_clean(clone, "llama", "sdpa")
        assert outer.cache is None
        assert torch.equal(first, answer(model, "llama"))
        assert inner.memory() == outer.memory()


def test_an_attached_model_is_freed_with_its_last_user() -> None:
    model = model_of("llama")
    cache = QuantizedCache(model, KIVI)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    cache.detach()


def test_shallow_copies_of_caches_are_refused() -> None:
    model, given = model_of("llama"), inputs("llama", [[20]])
    cache = QuantizedCache(model, KIVI)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    with pytest.raises(TypeError, match=r"shallow copy .*copy\.deepcopy\(cache\)"):
        copy.copy(cache)
    assert copy.deepcopy(cache).memory() == cache.memory()
