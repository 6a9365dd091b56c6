"""The record of an eviction: its rules, its place in a spec, and what the schemes set."""

import pytest

import duotone
from duotone import CacheSpec, Eviction, Sharing


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("keep", 0.0, "keep must lie in"),
        ("keep", 1.5, "keep must lie in"),
        ("keep", float("nan"), "keep must lie in"),
        ("budget", "entropy", "budget must be one of"),
        ("judges", "all", "judges must be one of"),
        ("window", 0, "window must lie in"),
        ("newest_weight", 0.5, "newest_weight must be >= 1"),
        ("sink", -1, "Eviction.sink must be"),
        ("recent", 1.1, "Eviction.recent must lie in"),
        ("nested", 1, "nested must be a bool"),
        ("which", "text", "which must be one of"),
    ],
)
def test_bad_fields_raise(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Eviction(**{field: value})


def test_nested_layers_need_budgets_that_never_grow() -> None:
    assert Eviction(budget="pyramid", nested=True).nested
    with pytest.raises(ValueError, match="never grow"):
        Eviction(budget="sparsity", nested=True)


def test_specs_hold_evictions_and_survive_json() -> None:
    spec = duotone.scheme("calibquant").replace(evict=Eviction(0.25, sink=2))
    assert CacheSpec.from_json(spec.to_json()) == spec
    assert CacheSpec(evict={"keep": 0.5}).evict == Eviction(0.5)
    assert CacheSpec().evict is None
    with pytest.raises(ValueError, match="Eviction or None"):
        CacheSpec(evict=0.5)
    with pytest.raises(ValueError, match="fields"):
        CacheSpec(evict={"share": 0.5})


def test_layers_that_share_codes_cannot_drop_different_tokens() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        duotone.scheme("xquant").replace(evict=Eviction())
    assert CacheSpec(share=Sharing()).evict is None


@pytest.mark.parametrize("name", ["vl-cache", "pyramidinfer-cache"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_schemes_keep_the_memory_of_so_many_bits(name: str, bits: int) -> None:
    spec = duotone.scheme(name, bits=bits)
    assert spec.evict.keep == bits / 16
    assert spec.nominal_bits(layers=32) == bits
    assert duotone.scheme(name, keep=0.1).evict.keep == 0.1
    with pytest.raises(ValueError, match="keep must lie in"):
        duotone.scheme(name, bits=17)


def test_nominal_bits_of_eviction_and_quantization_multiply() -> None:
    spec = duotone.scheme("kivi", bits=2).replace(evict=Eviction(0.25))
    assert spec.nominal_bits(layers=32) == 0.5
    assert CacheSpec(visual="dense", evict=Eviction(0.125)).nominal_bits(layers=3) == 2.0
