"""A scheme that is new is one entry; a field that nothing honours is refused by all doors."""

import pytest

import duotone
from duotone import SCHEMES, CacheSpec, KVSpec, LayerRule, QuantizedCache, TensorSpec
from duotone.quant.schemes import Scheme
from toy_specs import (
    DecodedCache,
    DecodedPair,
    DecodedTensor,
    PolicyCache,
    StoredTensor,
    WithoutRole,
)

from families import inputs, tiny_model

SPECS = {
    "decoded": lambda toy: CacheSpec(visual=KVSpec(DecodedTensor(toy=toy))),
    "stored": lambda toy: CacheSpec(visual=KVSpec(TensorSpec(), StoredTensor(toy=toy))),
    "rule": lambda toy: CacheSpec(
        visual=KVSpec(), layers=(LayerRule(0, 1, visual=KVSpec(DecodedTensor(toy=toy))),)
    ),
    "pair": lambda toy: CacheSpec(visual=DecodedPair(toy=toy)),
    "cache": lambda toy: DecodedCache(toy=toy),
    "without a role": lambda toy: WithoutRole(toy=toy),
}


def open_doors(spec: CacheSpec) -> list:
    """A call for each door that takes a spec."""
    model = tiny_model("internvl")

    def enable() -> None:
        with duotone.enable(model, spec):
            pass

    plan = {"visual_tokens": 1}
    return [
        lambda: QuantizedCache(model, spec), enable, lambda: duotone.plan(model, spec, **plan)
    ]  # fmt: skip


@pytest.mark.parametrize("role", SPECS)
def test_a_field_that_nothing_honours_is_refused_by_all_doors(role: str) -> None:
    for door in open_doors(SPECS[role](1)):
        with pytest.raises(ValueError, match=r"have no choice of toy; got toy=1\. Leave the"):
            door()
    for door in open_doors(SPECS[role](0)):
        door()


def test_a_field_that_chooses_tokens_is_taken_by_all_doors() -> None:
    for door in open_doors(PolicyCache(toy=1)):
        door()


def test_a_new_scheme_is_one_entry(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from duotone.cli import main

    def build(bits: int = 2) -> CacheSpec:
        return CacheSpec(visual=KVSpec(TensorSpec(bits), TensorSpec(4)))

    monkeypatch.setitem(SCHEMES, "toy", Scheme("two digits for K, four for V", build))
    assert duotone.scheme("toy", bits=1).visual.key.bits == 1
    monkeypatch.setattr("sys.argv", ["duotone", "schemes"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "two digits for K, four for V" in capsys.readouterr().out
    model, given = tiny_model("internvl"), inputs("internvl", [[3, "image", 9]])
    cache = QuantizedCache(model, duotone.scheme("toy"))
    model.generate(**given, past_key_values=cache, max_new_tokens=3)
    assert cache.memory().codes_bytes
