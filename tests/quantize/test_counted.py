"""Bytes of weights counted from shapes are those of the model that quantization makes."""

import copy

import pytest

from duotone.hf.weights.checkpoint import load_empty, save
from duotone.hf.weights.counted import recipe_bytes, tensor_bytes
from duotone.hf.weights.part_bytes import part_bytes
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.methods.recipe import get_recipe

from mquant_setups import quantized, tiny_loaded

EXACT = {
    "rtn-w4a8": {},
    "static-msq-rotation-w4a8": {},
    "mquant-always-split-w8a8": {},
    "awq-w4a16-g128": {"group": 16},
    "w4a16-g128": {"group": 96},
    "quarot-per-token-w4a8": {},
}


@pytest.mark.parametrize("name", EXACT)
def test_counted_bytes_are_those_of_the_quantized_model(name):
    counted = recipe_bytes(tiny_loaded().model, get_recipe(name).replace(**EXACT[name]))
    loaded, report = quantized(name, **EXACT[name])
    assert counted == report["bytes"]["after"]
    assert tensor_bytes(loaded.model) == counted["total"]


def test_where_numbers_decide_the_count_is_a_bound():
    recipe = get_recipe("mquant-head8-w4a8")
    bounds = [recipe.replace(split=split) for split in ("never", "eq8")]
    least, most = (recipe_bytes(tiny_loaded().model, one)["total"] for one in bounds)
    _, report = quantized("mquant-head8-w4a8")
    assert report["bytes"]["after"]["head"] > 0
    assert least < report["bytes"]["after"]["total"] < most


def test_counting_leaves_the_model_as_it_is():
    model = tiny_loaded().model
    before, config = part_bytes(model, weight_map(model)), copy.deepcopy(model.config)
    recipe_bytes(model, get_recipe("mquant-head8-w4a8"))
    assert part_bytes(model, weight_map(model)) == before
    assert before["total"] == tensor_bytes(model)
    assert model.config.to_dict() == config.to_dict()


def test_a_checkpoint_is_counted_without_its_tensors(tmp_path):
    loaded, report = quantized("mquant-w4a8")
    empty = load_empty(save(loaded.model, tmp_path / "q"))
    assert tensor_bytes(empty) == report["bytes"]["after"]["total"]
    with pytest.raises(ValueError, match="quantized already"):
        recipe_bytes(empty, get_recipe("rtn-w4a8"))
