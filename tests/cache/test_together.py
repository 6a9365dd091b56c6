"""Layers that take in a prompt together."""

import pytest
import torch
from together_cases import LAYERS, SPECS, assert_equal, assert_together, prompt

import duotone
from duotone import TensorSpec
from duotone.cache import AppendPlan, LayerStore, Ledger
from duotone.cache.together import can_join, changed_bytes, form_of

from cases import device


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_layers_have_the_bits_that_each_has_alone(name: str, batch: int) -> None:
    alone = assert_together(SPECS[name], batch, torch.float32)
    with pytest.raises(AssertionError):
        assert_equal(alone[0], alone[LAYERS - 1])


@pytest.mark.parametrize(
    "spec",
    [
        duotone.scheme("oscar-rotation"),
        duotone.scheme("kvarn"),
        duotone.scheme("innerq"),
        duotone.CacheSpec(visual=duotone.KVSpec(TensorSpec(1), TensorSpec(1, "span", heads="all"))),
    ],
    ids=["basis", "factors", "inner groups", "one range for heads"],
)
def test_layers_whose_heads_know_of_each_other_stay_apart(spec: duotone.CacheSpec) -> None:
    assert not can_join(LayerStore(spec))


def alike(one: LayerStore, other: LayerStore, plan: AppendPlan) -> bool:
    return form_of(one, plan) == form_of(other, plan)


def test_layers_of_other_rules_types_or_orders_stay_apart() -> None:
    spec, other = SPECS["mixed"], SPECS["kivi"]
    layers = assert_together(spec, 1, torch.float32)
    visual, real = prompt(1)
    plan = Ledger(spec, 1, device()).plan(visual, real)
    one, two, three = layers
    assert alike(one, two, plan)
    assert not alike(LayerStore(spec), LayerStore(other), plan)
    assert not alike(one, LayerStore(spec), plan)
    assert one.stream.records is not None
    two.stream = two.stream.canonical()
    assert not alike(one, two, plan)
    words = Ledger(spec, 1, device()).plan(torch.zeros_like(visual), real)
    three.visual = None
    assert not alike(one, three, plan)
    assert alike(one, three, words)
    three.dtype = torch.float16
    assert not alike(one, three, words)
    three.lends.add("key")
    assert not can_join(three)


def test_bytes_of_stores_that_a_step_changes() -> None:
    spec = SPECS["mixed"]
    store = assert_together(spec, 1, torch.float32)[0]
    visual, real = prompt(1)
    pairs = [store.visual, store.background, store.stream]
    packed = [pair.codes_bytes + pair.params_bytes for pair in pairs]
    dense = store.key.nbytes + store.value.nbytes
    with_pictures = Ledger(spec, 1, device()).plan(visual, real)
    words = Ledger(spec, 1, device()).plan(torch.zeros_like(visual), real)
    assert changed_bytes(store, with_pictures) == sum(packed) + dense
    assert changed_bytes(store, words) == packed[2] + dense
