"""Keys are scaled under few-bit weights, by what their codes stand for."""

import pytest
import torch

import duotone
from benchmarks import stress
from duotone import QuantizedCache
from duotone.hf.weights.fusion import is_fused
from duotone.quantize import quantize_model
from duotone.weights.methods.recipe import get_recipe

from mquant_setups import tiny_data, tiny_loaded


@pytest.mark.parametrize("recipe", ["rtn-w8a8", "mquant-w4a8"])
def test_codes_scale_keys_as_the_weights_that_they_were_made_of(recipe: str) -> None:
    loaded, spec = tiny_loaded(), duotone.scheme("duotone")
    stress.grow_keys(loaded.model, 8)
    before = QuantizedCache(loaded.model, spec).timeline.scales.each
    quantize_model(loaded.model, get_recipe(recipe), tiny_data(loaded), name="tiny")
    assert is_fused(loaded.model)
    after = QuantizedCache(loaded.model, spec).timeline.scales.each
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.2, atol=0)
