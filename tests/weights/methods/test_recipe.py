import json

import pytest

from duotone.weights.methods.recipe import RECIPES, Recipe, get_recipe

NAMED = (
    "mquant-w4a8",
    "mquant-w8a8",
    "mquant-w4a8-g128",
    "w4a16-g128",
    "rtn-w4a8",
    "rtn-w8a8",
    "smoothquant-w4a8",
    "smoothquant-w8a8",
    "quarot-w4a8",
    "quarot-w8a8",
    "static-w4a8",
    "static-msq-w4a8",
    "static-msq-aifs-w4a8",
    "static-msq-aifs-w8a8",
    "static-msq-rotation-w4a8",
    "awq-w4a8",
    "awq-w4a16-g128",
)


@pytest.mark.parametrize("name", NAMED)
def test_named_recipes_survive_json(name):
    recipe = get_recipe(name)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_mquant_is_the_last_of_its_ablations():
    last, whole = RECIPES["static-msq-rotation-w4a8"], RECIPES["mquant-w4a8"]
    assert whole == last.replace(split="eq8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"method": "hqq"}, "method must be one of"),
        ({"activation": "fp8"}, "activation must be one of"),
        ({"ranges": "median"}, "ranges must be one of"),
        ({"online": "fourier"}, "online must be one of"),
        ({"split": True}, "split must be one of"),
        ({"parts": ("audio",)}, "parts must be some of"),
        ({"parts": ()}, "parts must be some of"),
        ({"group": 7}, "even number"),
        ({"smooth": 2.0}, "between 0 and 1"),
        ({"visual_weight": -1.0}, "visual_weight"),
        ({"activation": "dynamic", "modality_scales": True}, "need static activations"),
        ({"visual_first": True}, "a way to apply modality_scales"),
        ({"split": "always"}, "needs an online transform"),
        ({"activation": "none", "online": "hadamard", "split": "eq8"}, "floating-point activation"),
        ({"smooth": 0.5, "rotation": True}, "rivals"),
        ({"method": "awq", "smooth": 0.5}, "awq finds scales of its own"),
        ({"method": "awq", "rotation": True}, "awq finds scales of its own"),
        ({"method": "awq", "online": "hadamard"}, "awq finds scales of its own"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_unknown_names_and_fields_are_refused():
    with pytest.raises(ValueError, match="did you mean mquant-w4a8"):
        get_recipe("mquant-w4")
    assert get_recipe("mquant-w4a8-g128") == get_recipe("mquant-w4a8").replace(group=128)
    with pytest.raises(ValueError, match=r"got \['rank'\]"):
        Recipe.from_dict({"rank": 1})
