"""A model hears once per cause why its cache is slow, and before a run what cannot be."""

import warnings

import pytest
import torch
from held_still import HeldStill
from shrunk import tiny_model_of
from small_specs import STREAM
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, QuantizedCache, SlowPathWarning
from duotone.attention import decode_attention
from duotone.attention.triton import family as triton_family
from duotone.cache import DenseSegment
from pretended_gpu import pretend

from families import inputs, new_model, tiny_model

NEW = 8


def heard(run) -> list[str]:
    """Warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if w.category is SlowPathWarning]


def held_steps(model: PreTrainedModel, given: dict) -> None:
    """Decode in fixed buffers."""
    cache = QuantizedCache(model, STREAM)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    step = HeldStill(model, cache, NEW)
    for _ in range(NEW):
        step(torch.full((2, 1), 7))


def test_generate_says_each_cause_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    model, given = new_model("llama"), inputs("llama", [[23], [9]])

    def enabled() -> None:
        with duotone.enable(model, STREAM):
            model.generate(**given, max_new_tokens=NEW, do_sample=False)

    (message,) = heard(enabled)
    assert "group records need groups of 32, 64 or 128" in message
    assert not heard(enabled)
    assert not heard(lambda: held_steps(model, given))
    assert len(heard(lambda: held_steps(new_model("llama"), given))) == 1


def test_sliding_layers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    model, given = new_model("mistral"), inputs("mistral", [[19], [7]])
    model.config.sliding_window = 8
    cache = QuantizedCache(model, STREAM.replace(visual="dense"))
    messages = heard(lambda: model.generate(**given, past_key_values=cache, max_new_tokens=NEW))
    assert sum("no mask" in message for message in messages) == 1


def test_a_cpu_hears_nothing() -> None:
    model, given = tiny_model("llama"), inputs("llama", [[23], [9]])
    cache = QuantizedCache(model, STREAM)
    assert not heard(lambda: model.generate(**given, past_key_values=cache, max_new_tokens=NEW))


def enter(model: PreTrainedModel, spec: CacheSpec, impl: str) -> None:
    with duotone.enable(model, spec, impl=impl):
        raise AssertionError


def test_cuda_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = tiny_model("llama"), duotone.scheme("kivi", bits=2)
    with pytest.raises(ValueError, match="for text tokens: CUDA kernels need a CUDA device"):
        enter(model, fits, "cuda")
    pretend(monkeypatch)
    with pytest.raises(ValueError, match=r"for text tokens: groups along channels .* divide 16"):
        QuantizedCache(model, fits, impl="cuda")
    with pytest.raises(ValueError, match="for text tokens: group records need groups of 32"):
        QuantizedCache(model, STREAM, impl="cuda")
    with pytest.raises(ValueError, match=r"impl must be one of .* got 'fast'"):
        enter(model, fits, "fast")


def test_triton_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("llama")
    query = torch.ones(1, 1, 1, 8)
    dense = DenseSegment(query, query, torch.ones(1, dtype=torch.int32))
    for installed, said in ((True, "needs a CUDA device.*on cpu"), (False, "is not installed")):
        monkeypatch.setattr(triton_family, "find_spec", lambda name, found=installed: found or None)
        rule = rf"^impl='triton' is not possible: [^\n]*{said}[^\n]*Use impl='auto'\.$"
        with pytest.raises(ValueError, match=rule):
            enter(model, STREAM, "triton")
        with pytest.raises(ValueError, match=rule):
            QuantizedCache(model, STREAM, impl="triton")
        with pytest.raises(ValueError, match=rule):
            decode_attention(query, [dense], sm_scale=1.0, impl="triton")


def test_layers_that_stand_in_the_way_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    model = new_model("llama").to(torch.bfloat16)
    odd = duotone.LayerRule(1, 2, text=STREAM.text)
    spec = duotone.scheme("kivi", bits=2).replace(layers=(odd,))
    with pytest.raises(ValueError, match=r"for text tokens.*Use impl='auto'"):
        QuantizedCache(model, spec, impl="cuda")


def test_towers_of_a_flat_config_keep_their_attention() -> None:
    model = tiny_model_of("idefics")
    tower = model.config.vision_config
    before = tower._attn_implementation
    with duotone.enable(model, duotone.scheme("kivi", bits=2)):
        assert (model.config._attn_implementation, tower._attn_implementation) == (
            "duotone",
            before,
        )
    assert tower._attn_implementation == before != "duotone"
