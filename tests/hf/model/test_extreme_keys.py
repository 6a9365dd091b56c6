"""Biases of K as Qwen2.5-7B has them: presets bear them, and a shared range is warned of."""

from typing import Any, NoReturn

import pytest
import torch
from family_configs import MROPE
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.evaluate.forcing import kl_divergence
from duotone.hf.model.attentions import attentions
from duotone.hf.model.extreme_keys import _ratio
from duotone.hf.model.facts import model_facts

from families import FAMILIES, HYBRIDS, inputs, new_model, tiny_model

CHANNELS = TensorSpec(4, along="channels", group=16)
SHARED = CacheSpec(visual="text", text=KVSpec(CHANNELS, CHANNELS))
# Norms of k_proj's bias by layer: 22 in the layers between, over four heads of 128 channels.
NORMS = (605.0, 22.0, 921.0)
# Q, K and V of one matrix, of which nothing is read.
FUSED = ("phi4_multimodal",)
SLOWEST = 7  # of the channels that RoPE rotates with those 8 further on


def with_biases(norms: tuple[float, ...]) -> PreTrainedModel:
    """Qwen2.5-VL and its RoPE, which hardly rotates the one large channel of each head."""
    config = FAMILIES["qwen2_5_vl"].config()
    config.text_config.rope_parameters = {**MROPE, "rope_theta": 1e6}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for attention, norm in zip(attentions(model, model_facts(model)), norms, strict=True):
        bias = attention.k_proj.bias.data.zero_().view(-1, attention.head_dim)
        bias[:, SLOWEST] = norm / 4**0.5
    return model


def divergence(model: PreTrainedModel, spec: CacheSpec) -> float:
    """KL from the model with its own cache, over 16 tokens after a long prompt."""
    given = inputs("qwen2_5_vl", [[20, *["image"] * 8, 150]])
    later = {"input_ids": torch.arange(5, 21)[None]}
    logits = []
    for cache in (DynamicCache(), QuantizedCache(model, spec)):
        with torch.no_grad():
            model(**given, past_key_values=cache)
            logits.append(model(**later, past_key_values=cache).logits.double())
    return float(kl_divergence(*logits).mean())


@pytest.mark.parametrize(
    "scheme", ["duotone@1", "duotone-mixed@2", "kivi@2", "duotone@2", "duotone@3"]
)
def test_a_range_per_channel_bears_large_biases(scheme: str) -> None:
    name, bits = scheme.split("@")
    spec = duotone.scheme(name, bits=int(bits))
    assert divergence(with_biases(NORMS), spec) < 1.5 * divergence(with_biases((0.0,) * 3), spec)


def test_a_range_of_several_channels_does_not_and_says_so() -> None:
    model = with_biases(NORMS)
    with pytest.warns(UserWarning, match=r"'qwen2_5_vl' channels of layers \[0, 2\] reach"):
        assert divergence(model, SHARED) > 3 * divergence(with_biases((0.0,) * 3), SHARED)
    with pytest.warns(UserWarning, match=r"layers \[0, 2\]"):
        duotone.plan(model, SHARED, text_tokens=64)
    with pytest.warns(UserWarning, match=r"layers \[0, 2\]"), duotone.enable(model, SHARED):
        pass


def widths_of(spec: CacheSpec, layer: int) -> set[str]:
    own = spec.at_layer(layer)
    return {x.param_dtype for kv in (own.visual, own.background) for x in (kv.key, kv.value)}


def test_extreme_layers_have_parameters_of_16_bits() -> None:
    spec, model = duotone.scheme("duotone", bits=1), with_biases(NORMS)
    cache = QuantizedCache(model, spec)
    assert [widths_of(cache.spec, i) for i in range(3)] == [{"float16"}, {"float8"}, {"float16"}]
    assert QuantizedCache(model, cache.spec).spec == cache.spec
    assert QuantizedCache(with_biases((0.0,) * 3), spec).spec == spec
    rule = duotone.LayerRule(0, 1, visual=spec.visual, background=spec.background)
    assert widths_of(QuantizedCache(model, spec.replace(layers=(rule,))).spec, 0) == {"float16"}


def test_a_plan_counts_parameters_of_extreme_layers() -> None:
    spec, model = duotone.scheme("duotone", bits=1), with_biases(NORMS)
    cache = QuantizedCache(model, spec)
    model(**inputs("qwen2_5_vl", [[20, *["image"] * 8, 150]]), past_key_values=cache)
    pictures = {"visual_tokens": 32, "images": 8}  # of four tokens each
    plans = [duotone.plan(x, spec, text_tokens=2, **pictures) for x in (model, model.config)]
    assert plans[1].params_bytes < plans[0].params_bytes == cache.memory().params_bytes


def test_a_file_says_how_its_codes_are_kept(tmp_path) -> None:
    """Other weights of the same shapes may read it, and need no parameters of 16 bits."""
    spec, path = duotone.scheme("duotone", bits=1), tmp_path / "cache.safetensors"
    given = inputs("qwen2_5_vl", [[20, *["image"] * 8, 150]])
    for norms, others in ((NORMS, (0.0,) * 3), ((0.0,) * 3, NORMS)):
        model = with_biases(norms)
        cache = QuantizedCache(model, spec)
        model(**given, past_key_values=cache)
        cache.save(path)
        again = QuantizedCache.load(path, with_biases(others), waive=("weights",))
        assert again.spec == cache.spec
        assert again.memory().params_bytes == cache.memory().params_bytes
        path.unlink()


def test_only_layers_that_share_a_range_are_named() -> None:
    rule = duotone.LayerRule(start=2, text=SHARED.text)
    spec = duotone.scheme("kivi", bits=2).replace(layers=(rule,))
    with pytest.warns(UserWarning, match=r"layers \[2\]"):
        QuantizedCache(with_biases(NORMS), spec)


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_ordinary_weights_are_not_extreme(name: str) -> None:
    model = tiny_model(name)
    ratios = [_ratio(each) for each in attentions(model, model_facts(model))]
    assert (len(ratios) == 0) == (name in FUSED)
    assert all(0 < ratio < 5 for ratio in ratios)


def test_norms_of_keys_count() -> None:
    model = new_model("qwen3")
    attentions(model, model_facts(model))[1].k_norm.weight.data[3] = 40
    with pytest.warns(UserWarning, match=r"'qwen3' channels of layers \[1\] reach 40 times"):
        QuantizedCache(model, SHARED)


class Codes(torch.Tensor):
    """A quantizer's weight, which says that it is of floats and knows no operation on them."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError


def test_weights_that_cannot_be_read_warn_of_nothing() -> None:
    model = new_model("qwen3")
    first, second, *_ = attentions(model, model_facts(model))
    # As accelerate offloads: a hook brings the numbers for a forward pass, and moves its inputs.
    first.k_norm.weight = torch.nn.Parameter(torch.ones(first.head_dim, device="meta"))
    first.k_norm.register_forward_pre_hook(lambda _, args: (args[0].to("cpu"),))
    second.k_norm = None
    for kept in (torch.ones(32, 8).as_subclass(Codes), torch.ones(32, 8).to(torch.float8_e4m3fn)):
        second.k_proj._parameters["weight"] = kept
        assert (_ratio(first), _ratio(second)) == (0, 0)


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_biases(NORMS)
    with pytest.warns(UserWarning, match=r"layers \[0, 2\]"):
        QuantizedCache(model, SHARED)
    monkeypatch.setattr("duotone.hf.model.extreme_keys.attentions", None)
    with pytest.warns(UserWarning, match=r"layers \[0, 2\]"):
        QuantizedCache(model, SHARED)
