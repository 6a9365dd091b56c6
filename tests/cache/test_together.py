"""Layers that take in a prompt together."""

import pytest
import torch
from together_cases import LAYERS, SPECS, assert_equal, assert_together

import duotone
from duotone import TensorSpec
from duotone.cache import LayerStore
from duotone.cache.together import are_alike, can_join


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
        duotone.CacheSpec(visual=duotone.KVSpec(TensorSpec(1), TensorSpec(1, "span", heads="all"))),
    ],
    ids=["basis", "factors", "one range for heads"],
)
def test_layers_whose_heads_know_of_each_other_stay_apart(spec: duotone.CacheSpec) -> None:
    assert not can_join(LayerStore(spec))


def test_layers_with_tokens_or_other_rules_stay_apart() -> None:
    stores = [LayerStore(SPECS[name]) for name in ("mixed", "mixed", "kivi")]
    assert are_alike(*stores[:2])
    assert not are_alike(*stores[1:])
    stores[0].key = torch.zeros(1, 1, 0, 8)
    assert not can_join(stores[0])
    stores[1].lends.add("key")
    assert not can_join(stores[1])
