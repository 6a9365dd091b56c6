import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import duotone
from duotone.planning.memory import plan
from duotone.planning.shapes import SHAPE_8B
from duotone.quant import CacheSpec, KVSpec, TensorSpec, quantize
from duotone.tune.build import boosted, counts_of, natural_ranking, spec_of, starved
from duotone.tune.seeds import kivi, parts, plain, preset, seed_points
from duotone.tune.space import SHARES, TAUS, Choice, merged, prefixed, space_for

LAYERS = 6
SPACES = {
    "pictures": space_for(LAYERS, visual=True, text=False),
    "pictures and text": space_for(LAYERS, visual=True, text=True),
    "text": space_for(LAYERS, visual=False, text=True),
    "portable": space_for(LAYERS, visual=True, text=False, portable=True),
}


def points(space):
    def of(dimension):
        if isinstance(dimension, Choice):
            return st.sampled_from(dimension.values)
        steps = round((dimension.high - dimension.low) / dimension.step)
        return st.integers(0, steps).map(lambda k: dimension.low + k * dimension.step)

    return st.fixed_dictionaries({d.name: of(d) for d in space.dimensions})


@pytest.mark.parametrize("name", SPACES)
@given(data=st.data())
def test_a_point_is_a_valid_spec_or_a_value_error(name, data):
    space = SPACES[name]
    try:
        spec = spec_of(data.draw(points(space)), LAYERS)
    except ValueError:
        return
    assert duotone.CacheSpec.from_json(spec.to_json()) == spec
    assert name != "text" or spec.visual == "text"
    if name == "portable":
        assert (spec.layers, spec.share) == ((), None)


@given(point=points(SPACES["portable"]))
def test_what_is_built_quantizes_real_numbers(point):
    try:
        spec = spec_of(point, LAYERS)
        plan(SHAPE_8B, spec, visual_tokens=320)
    except ValueError:
        return
    policy = spec.text if spec.visual == "text" else spec.visual
    x = torch.randn(1, 320, 64, generator=torch.Generator().manual_seed(0))
    for tensor in (policy.key, policy.value):
        assert torch.isfinite(quantize(x, tensor).dequantize()).all()


@pytest.mark.parametrize("name", SPACES)
def test_most_seeds_are_usable_and_all_are_in_the_space(name):
    space = SPACES[name]
    seeds = seed_points(space)
    assert len(seeds) >= (3 if name == "text" else 12)
    for seed in seeds:
        assert space.point(**seed) == seed
        spec_of(seed, LAYERS)


BOTH = ("key", "value")


def asymkv(lk, lv):
    return duotone.scheme("asymkv", lk=lk, lv=lv)


def in_8_bits(kv):
    return KVSpec(*(tensor.replace(param_dtype="float8") for tensor in (kv.key, kv.value)))


KEY = TensorSpec(levels="lloyd", gain="fit", energy=1.0, classes=((4, 3 / 8), (2, 1 / 4)))
VALUE = TensorSpec(levels="lloyd", energy=1.5, classes=((4, 1 / 8), (2, 3 / 4)))
FEW = {"classes": ((2, 1 / 8), (1, 1 / 4))}
PARTS = CacheSpec(
    visual=KVSpec(KEY, VALUE),
    background=KVSpec(KEY.replace(**FEW), VALUE.replace(**FEW)),
    foreground=3 / 8,
    ranges="run",
)
KNOWN = {
    "duotone": (preset(), duotone.scheme("duotone-whole")),
    "minmax @2": (plain(2), duotone.scheme("minmax", bits=2)),
    "calibquant": (
        merged(plain(1), {"key_shrink": 0.5, "value_shrink": 0.3, "tau": "0,3"}),
        duotone.scheme("calibquant"),
    ),
    "kivi @2": (kivi(2), duotone.scheme("kivi")),
    "kivi-sink @4": (kivi(4, recent=96, sink=32), duotone.scheme("kivi-sink", bits=4)),
    "xquant in pairs": (
        merged(kivi(1), prefixed(("key", "value"), eta=100), {"key_share_from": 0}),
        duotone.scheme("xquant", km=0, vm=99, eta1=1 / 6).replace(
            share=duotone.quant.spec.Sharing(key=0), layers=()
        ),
    ),
    "kivi's drained window": (
        kivi(2, recent=0, flush=128),
        duotone.scheme("kivi").replace(recent=0, flush=128),
    ),
    "lloyd @3": (merged(plain(3), prefixed(BOTH, levels="lloyd")), duotone.scheme("lloyd", bits=3)),
    "parts": (parts(), PARTS),
    "parts of 8-bit scales": (
        merged(parts(), prefixed(BOTH, param_dtype="float8")),
        PARTS.replace(visual=in_8_bits(PARTS.visual), background=in_8_bits(PARTS.background)),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_space_holds_known_schemes_exactly(name):
    point, spec = KNOWN[name]
    assert spec_of(SPACES["pictures"].point(**point), LAYERS) == spec


PREFIXED = {
    "asymkv": (merged(kivi(2), {"key_prefix": 4, "value_prefix": 0}), asymkv(4, 0)),
    "xquant, prefixes": (
        merged(
            kivi(2, key_prefix=4, value_prefix=2), prefixed(("key", "value"), eta=27, eta_after=200)
        ),
        duotone.scheme("xquant", kq=4, vq=2, km=99, vm=99, eta1=1 / 3, eta2=0.045).replace(
            share=None
        ),
    ),
}


@pytest.mark.parametrize("name", PREFIXED)
def test_prefixes_hold_known_schemes_layer_by_layer(name):
    point, spec = PREFIXED[name]
    found = spec_of(SPACES["pictures"].point(**point), LAYERS)
    assert [found.at_layer(i) for i in range(LAYERS)] == [spec.at_layer(i) for i in range(LAYERS)]
    assert len({found.at_layer(i) for i in range(LAYERS)}) > 1


def test_a_point_outside_of_the_space_is_refused():
    with pytest.raises(ValueError, match="does not contain"):
        SPACES["text"].point(key_top=5)
    with pytest.raises(ValueError, match="does not contain"):
        SPACES["text"].point(key_gain=1.01)
    with pytest.raises(ValueError, match=r"got \['tau'\]"):
        SPACES["text"].point(tau="none")


def test_boosted_layers_come_first_in_the_ranking_and_starved_ones_last():
    ranking = natural_ranking(LAYERS) | {"key": (4, 2, 0, 1, 3, 5)}
    point = SPACES["pictures"].point(**plain(2, key_boosted=2, key_starved=1))
    spec = spec_of(point, LAYERS, ranking)
    bits = [spec.at_layer(i).visual.key.bits for i in range(LAYERS)]
    assert bits == [2, 2, 4, 2, 4, 1]
    assert all(spec.at_layer(i).visual.value.bits == 2 for i in range(LAYERS))


def code_bits(counts):
    return sum(bits * share for bits, share in counts.items())


@given(point=points(SPACES["pictures"]))
def test_boosting_and_starving_move_the_bits_and_keep_shares_whole(point):
    for which in ("key", "value"):
        counts = counts_of(point, which)
        if not counts:
            continue
        for changed in (boosted(counts), starved(counts)):
            assert sum(changed.values()) <= SHARES
            assert all(bits in (1, 2, 3, 4, 8) and share > 0 for bits, share in changed.items())
        assert code_bits(boosted(counts)) >= code_bits(counts) >= code_bits(starved(counts))


def test_all_pairs_of_tau_and_eta_up_to_a_third_are_there():
    space = SPACES["pictures"]
    taus = {spec_of(space.point(**plain(1, tau=tau)), LAYERS).tau for tau in TAUS}
    assert taus == {None, *((a, b) for a in range(4) for b in range(4) if a or b)}
    assert len(taus) == 16
    etas = [spec_of(space.point(**plain(2, key_eta=n)), LAYERS).visual.key.eta for n in (0, 200)]
    assert etas == [0, 1 / 3]


def test_layers_after_a_prefix_have_half_the_bits_and_an_eta_of_their_own():
    choices = plain(4, key_prefix=2, key_eta=6, key_eta_after=60, key_boosted=1)
    ranking = natural_ranking(LAYERS) | {"key": (5, 4, 3, 2, 1, 0)}
    spec = spec_of(SPACES["pictures"].point(**choices), LAYERS, ranking)
    keys = [spec.at_layer(i).visual.key for i in range(LAYERS)]
    assert [key.bits for key in keys] == [4, 4, 2, 2, 2, 4]
    assert [key.eta for key in keys] == [0.01] * 2 + [0.1] * 4
    with pytest.raises(ValueError, match="does not contain"):
        SPACES["portable"].point(key_prefix=2)
