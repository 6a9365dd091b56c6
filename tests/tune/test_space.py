import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import duotone
from duotone.planning.memory import plan
from duotone.planning.shapes import SHAPE_8B
from duotone.quant import quantize
from duotone.tune.build import boosted, counts_of, natural_ranking, spec_of, starved
from duotone.tune.seeds import kivi, plain, preset, seed_points
from duotone.tune.space import SHARES, Choice, merged, prefixed, space_for

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


KNOWN = {
    "duotone": (preset(), duotone.scheme("duotone")),
    "minmax @2": (plain(2), duotone.scheme("minmax", bits=2)),
    "calibquant": (
        merged(plain(1), {"key_shrink": 0.5, "value_shrink": 0.3, "tau": "0,3"}),
        duotone.scheme("calibquant"),
    ),
    "kivi @2": (kivi(2), duotone.scheme("kivi")),
    "kivi-sink @4": (kivi(4, recent=96, sink=32), duotone.scheme("kivi-sink", bits=4)),
    "xquant in pairs": (
        merged(kivi(1), prefixed(("key", "value"), eta=0.165), {"key_share_from": 0}),
        duotone.scheme("xquant", km=0, vm=99, eta1=0.165).replace(
            share=duotone.quant.spec.Sharing(key=0), layers=()
        ),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_space_holds_known_schemes_exactly(name):
    point, spec = KNOWN[name]
    assert spec_of(SPACES["pictures"].point(**point), LAYERS) == spec


def test_a_point_outside_of_the_space_is_refused():
    with pytest.raises(ValueError, match="does not contain"):
        SPACES["text"].point(key_top=3)
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
            assert all(bits in (1, 2, 4, 8) and share > 0 for bits, share in changed.items())
        assert code_bits(boosted(counts)) >= code_bits(counts) >= code_bits(starved(counts))
