"""Units of keys, read from weights: what stresses plant is found, in every family."""

import copy

import pytest
import torch
from adapted import stand_in
from transformers import PreTrainedModel

import duotone
from benchmarks import stress
from duotone import CacheSpec, KVSpec, LayerRule, QuantizedCache, TensorSpec
from duotone.calibrate.random_bases import random_bases
from duotone.hf.model import key_scales as module
from duotone.hf.model.attentions import attentions
from duotone.hf.model.extreme_keys import with_wide_parameters
from duotone.hf.model.facts import model_facts
from duotone.hf.model.key_scales import key_scales, units_of
from duotone.hf.model.state_sizes import mean_squares
from duotone.quant import Sharing
from duotone.weights.methods.rtn import packed, round_to_nearest
from duotone.weights.modules.quant_linear import QuantLinear

from families import FAMILIES, HYBRIDS, new_model, tiny_model

EIGHT = TensorSpec(8, "channels")
SPEC = CacheSpec(visual="text", text=KVSpec(EIGHT, EIGHT))
CLASSES = TensorSpec(classes=((4, 1 / 8), (2, 1 / 4)))
ORDERING = CacheSpec(visual=KVSpec(CLASSES, EIGHT))
PER_CHANNEL = TensorSpec(8, group=8)
# Q, K and V of one matrix, of which nothing is read.
FUSED = ("phi4_multimodal",)
# Norms of other names or over several heads, which the stress does not scale.
OTHER_NORMS = ("lfm2", "lfm2_moe", "lfm2_vl", "olmo_hybrid")
NAMES = [*FAMILIES, *HYBRIDS]
GROWN = [name for name in NAMES if name not in (*FUSED, *OTHER_NORMS)]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are scaled however equal w is."""
    monkeypatch.setattr(module, "FAR", 0.5)


def found(model: PreTrainedModel, spec: CacheSpec = SPEC) -> list[torch.Tensor | None]:
    # Stresses change weights through `.data`, which counts no change.
    module._FOUND.clear()
    return key_scales(model, model_facts(model), spec)


def grown(name: str, factor: float = 8) -> PreTrainedModel:
    model = new_model(name)
    stress.grow_keys(model, factor)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_weights_scale_no_keys(name: str) -> None:
    assert found(tiny_model(name)) == [None] * model_facts(tiny_model(name)).layers


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", GROWN)
def test_what_keys_grew_by_is_what_they_are_scaled_back_by(name: str) -> None:
    pair = tiny_model(name), grown(name)
    plain, large = ([*found(model), *found(model, ORDERING)] for model in pair)
    for before, after in zip(plain, large, strict=True):
        ratio = before / after
        ratio = ratio / ratio.amin(-1, keepdim=True)
        are_large = ratio > 2
        assert (are_large.sum(-1) == 4).all()  # a quad of every head
        expected = torch.where(are_large, 8.0, 1.0)
        torch.testing.assert_close(ratio, expected, rtol=1e-4, atol=0)
        assert (after.amax(-1) == 1).all()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("name", "channels"),
    [("llama", (1, 9)), ("glm4v", (2, 3)), ("cohere2", (2, 3)), ("llama4", (2, 3, 10, 11))],
    ids=["halves", "neighbours of a half", "neighbours", "unknown pairs"],
)
def test_channels_that_rope_mixes_have_one_scale(name: str, channels: tuple[int, ...]) -> None:
    """One large channel of q makes the other one of its pair as large, after some tokens."""
    model = new_model(name)
    for attention in attentions(model, model_facts(model)):
        attention.q_proj.weight.data.unflatten(0, (-1, attention.head_dim))[:, channels[0]] *= 100
    for scale in found(model, ORDERING):
        large = scale[:, 0] > 0.5
        assert large.nonzero()[:, 1].tolist() == [*channels] * len(scale)
        assert (scale[:, 0, list(channels)] == 1).all()


@pytest.mark.usefixtures("everywhere")
def test_it_is_the_size_of_queries_after_rope() -> None:
    """Random tokens have white embeddings; 500 of them tell sizes to a tolerance."""
    torch.manual_seed(0)
    model = new_model("qwen2")
    seen = []
    first = attentions(model, model_facts(model))[0]
    first.q_proj.bias.data.view(4, 16)[:, 3] = 4
    first.q_proj.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        model(input_ids=torch.randint(2, 280, (1, 500)))
    squares = seen[0].view(500, 2, 2, 16).square().mean((0, 2))
    squares = (squares + squares.roll(8, -1)) / 2
    scale = found(model, ORDERING)[0][:, 0]
    ratio = (squares / squares.amax(-1, keepdim=True)).sqrt() / scale
    assert ratio.sub(1).abs().max() < 0.2
    assert scale.amin() < 0.7


SCALED = {
    "a range per token": SPEC,
    "a range per token of keys with a norm": SPEC.replace(key_norm=True),
    "channels of unequal bits": ORDERING,
    "an order of channels and a range per token": ORDERING.replace(text=SPEC.text),
    "a rotation": CacheSpec(visual=KVSpec(TensorSpec(2, transform="hadamard"), EIGHT)),
    "tokens that stand out": CacheSpec(
        visual=KVSpec(PER_CHANNEL, EIGHT), background=KVSpec(PER_CHANNEL, EIGHT)
    ),
}
LEFT = {
    "never": SPEC.replace(scale_keys="never"),
    "a range per channel": CacheSpec(visual=KVSpec(PER_CHANNEL, EIGHT)),
    "energies and gains": CacheSpec(
        visual=KVSpec(PER_CHANNEL.replace(energy=1.0, gain="fit"), EIGHT)
    ),
    "as published": duotone.scheme("innerq"),
    "no codes": CacheSpec(visual="dense"),
    "shared codes": SPEC.replace(share=Sharing(key=0, layers=2)),
}


@pytest.mark.parametrize("case", SCALED)
def test_quantizers_that_compare_channels_scale(case: str) -> None:
    assert None not in found(grown("llama"), SCALED[case])
    balanced = case in ("a range per token", "a rotation")
    assert units_of(SCALED[case], 0) == ("balanced" if balanced else "queries")


@pytest.mark.parametrize("case", LEFT)
def test_keys_stay_where_scales_could_change_nothing(case: str) -> None:
    assert found(grown("llama"), LEFT[case]) == [None] * 3


def test_calibrated_bases_are_of_keys_as_they_are() -> None:
    spec = duotone.scheme("duotone-klt")
    assert not any(units_of(spec, layer) for layer in range(8))


def test_layers_of_other_quantizers_stay() -> None:
    rule = LayerRule(1, 2, text=KVSpec(PER_CHANNEL, EIGHT))
    kinds = [w is None for w in found(grown("llama"), SPEC.replace(layers=(rule,)))]
    assert kinds == [False, True, False]


def test_layers_whose_queries_are_alike_stay() -> None:
    model = tiny_model("llama")
    model = copy.deepcopy(model)
    stress._scale_queries_and_keys(
        attentions(model, model_facts(model))[1], torch.tensor([0, 8]), 8
    )
    assert [w is None for w in found(model)] == [True, False, True]


@pytest.mark.usefixtures("everywhere")
def test_one_range_of_all_channels_loses_least_in_balanced_units() -> None:
    """Error of scores where all channels of k * w err alike, by as much as k * w is large."""
    model, facts = new_model("llama"), model_facts(tiny_model("llama"))
    layer = model.model.layers[0]
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        linear.weight.data *= torch.exp(torch.randn(len(linear.weight), 1))
    balanced, queries = (found(model, spec)[0][:, 0] for spec in (SPEC, ORDERING))
    given = (facts.shapes[0], 1.0)
    q, k = (mean_squares(layer.self_attn, layer.input_layernorm, x, *given) for x in "qk")

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (q / w.square()).sum(-1) * (k * w.square()).sum(-1)

    least = (q * k).sqrt().sum(-1).square()
    torch.testing.assert_close(loss(balanced), least)
    assert all((loss(w) > 1.1 * least).all() for w in (queries, torch.ones_like(q)))


def test_a_channel_without_keys_takes_no_range_of_others() -> None:
    model = grown("llama")
    for attention in attentions(model, model_facts(model)):
        attention.k_proj.weight.data.unflatten(0, (-1, 16))[:, [5, 13]] = 0
    rest = [channel for channel in range(16) if channel not in (5, 13)]
    assert all((scale[:, 0, rest] > module.LEAST).all() for scale in found(model))


def test_a_channel_that_no_query_reads_keeps_a_finite_scale() -> None:
    model = new_model("llama")
    for attention in attentions(model, model_facts(model)):
        rows = attention.q_proj.weight.data.unflatten(0, (-1, 16))
        rows[:, [0, 8]] = 0
        rows[:2] = 0  # all queries of a kv head
    for scale in [*found(model), *found(model, ORDERING)]:
        assert (scale[0] == 1).all()
        assert (scale[1, 0, [0, 8]] == module.LEAST).all()


@pytest.mark.usefixtures("everywhere")
def test_adapters_and_codes_are_read_by_what_they_stand_for() -> None:
    model, base = grown("llama"), found(tiny_model("llama"))
    assert all(map(torch.equal, found(stand_in("llama")), base))
    plain = found(model)
    for attention in attentions(model, model_facts(model)):
        codes, scale = round_to_nearest(attention.q_proj.weight.detach(), 8)
        attention.q_proj = QuantLinear(packed(codes, scale, 8), activation="dynamic")
    for ours, theirs in zip(found(model), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0)


def test_weights_that_cannot_be_read_scale_nothing() -> None:
    model = grown("llama")
    first, second, third = attentions(model, model_facts(model))
    first.q_proj.weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    second.q_proj._parameters["weight"] = torch.ones(64, 64).to(torch.float8_e4m3fn)
    third.q_proj.weight.data[0] = torch.nan
    assert found(model) == [None] * 3


def test_weights_are_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grown("llama")
    first = QuantizedCache(model, SPEC).timeline.scales.each
    second = QuantizedCache(model, SPEC).timeline.scales.each
    assert all(a is b for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        attentions(model, model_facts(model))[0].q_proj.weight[1].mul_(3)
    third = QuantizedCache(model, SPEC).timeline.scales.each
    assert not torch.equal(first[0], third[0])
    assert torch.equal(first[1], third[1])


def test_scaled_keys_are_not_extreme() -> None:
    """The warning is of keys as they are stored."""
    model = grown("llama", 64)
    QuantizedCache(model, SPEC)
    with pytest.warns(UserWarning, match="needs a range per channel"):
        QuantizedCache(model, SPEC.replace(scale_keys="never"))


def test_keys_in_bases_are_extreme_as_queries_see_them(tmp_path) -> None:
    """Bases have channels that are far from others in units of queries; biases stay extreme."""
    biased = new_model("qwen2_5_vl")
    for attention in attentions(biased, model_facts(biased)):
        attention.k_proj.bias.data.view(-1, attention.head_dim)[:, 0] = 300
    for model, is_same in ((grown("llava", 64), True), (biased, False)):
        spec = random_bases(model, tmp_path / f"{is_same}.safetensors")
        assert {tensor.param_dtype for tensor in spec.tensors} == {"float8"}
        assert (with_wide_parameters(model, model_facts(model), spec) == spec) == is_same


def test_scale_keys_is_auto_or_never() -> None:
    with pytest.raises(ValueError, match="scale_keys must be 'auto' or 'never'; got 'always'"):
        SPEC.replace(scale_keys="always")
    assert CacheSpec.from_json(LEFT["never"].to_json()) == LEFT["never"]
