"""`enable` whatever else is done to the model: settings, threads, copies, blocks out of order."""

import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.cache_argument import given_cache

from families import IMAGE, inputs, new_model, tiny_model

DENSE = CacheSpec(visual="dense", text="dense")
VISUAL = CacheSpec(visual=KVSpec(TensorSpec(2), TensorSpec(2)))
STREAM = CacheSpec(
    visual="text", text=KVSpec(TensorSpec(1, group=4), TensorSpec(1, along="channels"))
)


@pytest.fixture
def model() -> PreTrainedModel:
    """A model of its own: its settings are changed."""
    return new_model("internvl")


def answer(model: PreTrainedModel, **settings: object) -> torch.Tensor:
    given = inputs("internvl", [[3, "image", 9], [5, "image"]])
    return model.generate(**given, **{"max_new_tokens": 9, "do_sample": False, **settings})


def is_restored(model: PreTrainedModel) -> bool:
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return attention == "sdpa" and "generate" not in vars(model) and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "value"), [("use_cache", False), ("cache_implementation", "static")]
)
def test_the_models_own_settings_give_way(model: PreTrainedModel, name: str, value: object) -> None:
    expected = answer(model)
    setattr(model.generation_config, name, value)
    with duotone.enable(model, DENSE) as session:
        assert torch.equal(answer(model), expected)
    assert session.cache.get_seq_length() == expected.shape[1] - 1


def test_a_call_without_cache_gets_none(model: PreTrainedModel) -> None:
    config = GenerationConfig(use_cache=False, max_new_tokens=9, do_sample=False)
    expected = answer(model)
    with duotone.enable(model, STREAM) as session:
        assert torch.equal(answer(model, use_cache=False), expected)
        given = inputs("internvl", [[3, "image", 9], [5, "image"]])
        assert torch.equal(model.generate(**given, generation_config=config), expected)
        with pytest.raises(ValueError, match="no cache yet"):
            session.memory()


def test_a_call_for_another_cache_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="'static'"), duotone.enable(model, VISUAL):
        answer(model, cache_implementation="static")
    assert is_restored(model)


def test_a_cache_that_is_not_used_is_noticed(model: PreTrainedModel) -> None:
    cache = QuantizedCache(model, DENSE)
    with pytest.raises(ValueError, match=r"18 cached \+ 19 new.*keep use_cache on"):
        answer(model, past_key_values=cache, use_cache=False)


def test_blocks_may_end_in_any_order(model: PreTrainedModel) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(duotone.enable(model, VISUAL))
    session = second.enter_context(duotone.enable(model, STREAM))
    first.close()
    answer(model)
    assert session.cache.spec == STREAM
    second.close()
    assert is_restored(model)


def test_an_own_generate_comes_back(model: PreTrainedModel) -> None:
    calls = []
    model.generate = own = lambda **given: calls.append(given)
    with duotone.enable(model, VISUAL):
        answer(model)
    assert vars(model)["generate"] is own
    assert isinstance(given_cache(calls[0]), QuantizedCache)


def run_together(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_enable_schemes_of_their_own(model: PreTrainedModel) -> None:
    given = inputs("internvl", [[3, "image", 9], [5, "image"]])
    found, opened = {}, threading.Barrier(2, timeout=60)

    def run(spec: CacheSpec) -> None:
        with duotone.enable(model, spec) as session:
            opened.wait()
            model.generate(**given, max_new_tokens=9, do_sample=False)
            opened.wait()
            found[spec] = session.cache.spec

    run_together(lambda: run(VISUAL), lambda: run(STREAM))
    assert found == {VISUAL: VISUAL, STREAM: STREAM}
    assert is_restored(model)


def test_a_thread_inside_a_block_uses_it(model: PreTrainedModel) -> None:
    with duotone.enable(model, STREAM) as session:
        run_together(lambda: answer(model))
    assert session.cache.get_seq_length() > 0


def test_steps_of_two_caches_may_interleave(model: PreTrainedModel) -> None:
    """As threads interleave them: one cache's step begins within the other's."""
    given = inputs("internvl", [[3, "image", 9]])
    outer, inner = QuantizedCache(model, STREAM), QuantizedCache(model, STREAM)

    def another(*_: object) -> None:
        hook.remove()
        model(**given, past_key_values=inner)

    hook = model.get_decoder().layers[1].self_attn.register_forward_pre_hook(another)
    logits = model(**given, past_key_values=outer).logits
    expected = model(**given, past_key_values=QuantizedCache(model, STREAM)).logits
    assert torch.equal(logits, expected)
    token = given["input_ids"][:, -1:]
    one, other = (model(token, past_key_values=cache).logits for cache in (outer, inner))
    assert torch.equal(one, other)


def test_caches_and_attached_models_are_not_pickled(model: PreTrainedModel) -> None:
    cache = QuantizedCache(model, VISUAL)
    with pytest.raises(TypeError, match=r"cache\.save\(path\)"):
        pickle.dumps(cache)
    with pytest.raises(TypeError, match="while duotone is attached"):
        pickle.dumps(model)


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ({"spec": "duotone"}, r"must be a CacheSpec; got 'duotone'.*duotone\.scheme"),
        ({"spec": VISUAL.to_dict()}, "must be a CacheSpec; got a dict"),
        ({"model": torch.nn.Linear(2, 2)}, r"transformers model; got a Linear.*model inside"),
        ({"visual_mask": torch.ones(3)}, r"tensor of shape \(3,\)"),
        ({"visual_mask": [[True]]}, "got a list"),
    ],
    ids=["name", "dict", "no-model", "mask-1d", "mask-list"],
)
def test_what_is_no_model_spec_or_mask_is_refused(swap: dict, message: str) -> None:
    given = {"model": tiny_model("internvl"), "spec": VISUAL, **swap}
    with pytest.raises(ValueError, match=message):
        QuantizedCache(**given)
    with pytest.raises(ValueError, match=message), duotone.enable(**given):
        pass


def test_a_model_without_generate_is_refused_and_left_alone(model: PreTrainedModel) -> None:
    inner = model.model.language_model
    with pytest.raises(ValueError, match="Qwen2Model has none"), duotone.enable(inner, STREAM):
        pass
    assert not inner._forward_pre_hooks


def test_a_mask_of_another_width_is_refused(model: PreTrainedModel) -> None:
    ids = inputs("internvl", [[3, "image", 9], [5, "image"]])["input_ids"]
    for mask in (ids[:, 1:] == IMAGE, torch.cat([ids, ids], 1) == IMAGE):
        with (
            duotone.enable(model, VISUAL, visual_mask=mask),
            pytest.raises(ValueError, match="must cover the prompt, 18 tokens"),
        ):
            answer(model)


def test_a_cache_after_its_block_says_so(model: PreTrainedModel) -> None:
    with duotone.enable(model, VISUAL) as session:
        answer(model)
    with pytest.raises(RuntimeError, match="ends with its block"):
        model(torch.tensor([[5], [6]]), past_key_values=session.cache)
