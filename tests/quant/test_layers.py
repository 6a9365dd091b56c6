"""Rules of layers, sharing across them, and the papers' bit counts."""

import copy
import json
import pickle

import pytest

import duotone
from duotone import CacheSpec, KVSpec, LayerRule, Sharing, TensorSpec

TWO, ONE = (KVSpec(TensorSpec(b, group=32), TensorSpec(b, "channels", 32)) for b in (2, 1))
STREAM = CacheSpec(visual="text", text=TWO)


def bits_of(spec: CacheSpec, which: str, depth: int) -> list[int]:
    return [getattr(spec.at_layer(i).text, which).bits for i in range(depth)]


def test_later_rules_win_and_others_keep_the_cache_s_policy() -> None:
    wide = KVSpec(TWO.key.replace(bits=8), TWO.value)
    spec = STREAM.replace(layers=(LayerRule(1, 4, text=ONE), LayerRule(3, text=wide)))
    assert bits_of(spec, "key", 6) == [2, 1, 1, 8, 8, 8]
    assert bits_of(spec, "value", 6) == [2, 1, 1, 2, 2, 2]
    assert spec.at_layer(0).layers == ()
    assert CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_layers_alike_have_one_spec_of_their_own() -> None:
    spec = STREAM.replace(layers=(LayerRule(1, 4, text=ONE), LayerRule(3, text=TWO)))
    of_layers = [spec.at_layer(layer) for layer in range(6)]
    assert of_layers[1] is of_layers[2] is spec.at_layer(1)
    assert of_layers[4] is of_layers[5]
    assert of_layers[0] == of_layers[3] == STREAM
    fresh = CacheSpec.from_json(spec.to_json())
    assert (fresh, hash(fresh), repr(fresh)) == (spec, hash(spec), repr(spec))
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
    assert STREAM.at_layer(7) is STREAM


def test_all_layers_flush_together() -> None:
    long = KVSpec(TWO.key.replace(group=48), TWO.value)
    assert STREAM.replace(layers=(LayerRule(1, text=long),)).flush_tokens == 96


# XQuant Table 1: equivalent bit-widths of a model of 32 layers.
@pytest.mark.parametrize(
    ("scheme", "knobs", "bits"),
    [
        ("xquant", {"kq": 30, "vq": 2, "km": 32, "vm": 16}, 1.375),
        ("xquant", {"kq": 28, "vq": 0, "km": 32, "vm": 28}, 1.40625),
        ("asymkv", {"lk": 32, "lv": 0}, 1.5),
        ("asymkv", {"lk": 24, "lv": 32}, 1.875),
        ("asymkv", {}, 1.5),
        ("kivi", {"bits": 2}, 2.0),
        ("calibquant", {"bits": 1}, 1.0),
        ("dense", {}, 16.0),
    ],
)
def test_nominal_bits_are_the_papers(scheme: str, knobs: dict[str, int], bits: float) -> None:
    spec = duotone.scheme(scheme, **knobs)
    spec.check_depth(32)
    assert spec.nominal_bits(32) == bits


def counted_bits(spec: CacheSpec, depth: int) -> float:
    """Nominal bits, layer by layer."""
    stored = [
        bits_of(spec, which, depth)[i]
        for which in ("key", "value")
        for i in range(depth)
        if spec.source(which, i, depth) == i
    ]
    return sum(stored) / (2 * depth)


RULES = (LayerRule(1, 4, text=ONE), LayerRule(3, text=TWO), LayerRule(7, 9, text=ONE))
SHARINGS = [None, *(Sharing(k, v, n, n - 1) for k, v, n in ((0, None, 2), (3, 1, 3), (9, 2, 4)))]


@pytest.mark.parametrize("share", SHARINGS, ids=str)
def test_nominal_bits_are_those_counted_layer_by_layer(share: Sharing | None) -> None:
    spec = STREAM.replace(layers=RULES, share=share)
    for depth in range(1, 24):
        assert spec.nominal_bits(depth) == pytest.approx(counted_bits(spec, depth), rel=1e-12)


@pytest.mark.parametrize("share", SHARINGS, ids=str)
def test_nominal_bits_of_many_layers_take_no_longer(share: Sharing | None) -> None:
    deep = 2**31 - 1
    bits = STREAM.replace(layers=RULES, share=share).nominal_bits(deep)
    without = {None: 2, 2: 1.5, 3: 2 / 3, 4: 0.5}[share and share.layers]
    assert bits == pytest.approx(without, abs=1e-6)


def test_xquant_key_and_value_bits_apart() -> None:
    spec = duotone.scheme("xquant", kq=30, vq=2, km=32, vm=16)
    keys = sum(bits_of(spec, "key", 32)) / 32
    stored = [i for i in range(32) if spec.source("value", i, 32) == i]
    values = sum(bits_of(spec, "value", 32)[i] for i in stored) / 32
    assert (keys, values) == (1.9375, 0.8125)
    etas = {(t.bits, t.eta) for i in range(32) for t in (spec.at_layer(i).text.key,)}
    assert etas == {(2, 0.045), (1, 1 / 6)}


def test_xquant_gamma_is_the_weight_of_the_first_layer_of_a_pair() -> None:
    spec = duotone.scheme("xquant", kq=30, vq=2, km=32, vm=16, gamma=0.7)
    assert spec.share.weights == pytest.approx((0.7, 0.3))
    assert spec.nominal_bits(32) == 1.375
    assert CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(spec) != hash(duotone.scheme("xquant", kq=30, vq=2, km=32, vm=16))


@pytest.mark.parametrize(
    ("sharing", "sources"),
    [
        (Sharing(key=0), [0, 0, 2, 2, 4, 4, 6]),
        (Sharing(key=1), [0, 1, 1, 3, 3, 5, 5]),
        (Sharing(key=1, layers=3, dominant=2), [0, 3, 3, 3, 6, 6, 6]),
        (Sharing(key=2, layers=4, dominant=1), [0, 1, 3, 3, 3, 3, 6]),
        (Sharing(key=9), list(range(7))),
    ],
)
def test_sources_are_whole_runs(sharing: Sharing, sources: list[int]) -> None:
    spec = STREAM.replace(share=sharing)
    assert [spec.source("key", i, 7) for i in range(7)] == sources
    assert [spec.source("value", i, 7) for i in range(7)] == list(range(7))


@pytest.mark.parametrize(
    ("spec", "depth", "rule"),
    [
        (duotone.scheme("xquant", kq=30, vq=2, km=32, vm=16), 28, "within 28 layers"),
        (STREAM.replace(layers=(LayerRule(0, 9, text=ONE),)), 8, "within 8 layers"),
        (duotone.scheme("xquant", kq=3), 8, "equal bits.*even kq"),
        (
            CacheSpec(visual=duotone.scheme("duotone-whole").visual, share=Sharing(key=0)),
            4,
            "asymmetric, of one width",
        ),
    ],
    ids=["deeper-model", "rule-too-long", "odd-kq", "classes"],
)
def test_specs_that_do_not_fit_a_model_raise(spec: CacheSpec, depth: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        spec.check_depth(depth)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: LayerRule(3, 3), "0 <= start < stop"),
        (lambda: LayerRule(-1), "0 <= start < stop"),
        (lambda: LayerRule(text="dense"), "LayerRule.text"),
        (lambda: Sharing(layers=1), "integer >= 2"),
        (lambda: Sharing(dominant=2), "dominant must lie in the run"),
        (lambda: Sharing(key=-2), "must be a layer"),
        (lambda: Sharing(weights=(0.5, 0.3, 0.2)), "2 numbers >= 0, one per layer"),
        (lambda: Sharing(weights=(1.5, -0.5)), "numbers >= 0"),
        (lambda: Sharing(weights=(0.5, 0.4)), "must sum to 1"),
        (lambda: Sharing(weights=0.5), "numbers >= 0"),
        (lambda: duotone.scheme("xquant", gamma=1.2), r"gamma must lie in \[0, 1\]"),
        (lambda: duotone.scheme("xquant", gamma=0.7, layers=3), "gamma needs pairs"),
        (lambda: STREAM.replace(layers=(LayerRule(visual=ONE),)), "rule for visual"),
        (lambda: STREAM.replace(layers=("first",)), "LayerRules"),
        (lambda: STREAM.replace(share="pairs"), "must be a Sharing"),
        (lambda: STREAM.replace(layers=(LayerRule(text=KVSpec()),)), "needs a group"),
    ],
)
def test_bad_rules_raise(make, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make()
