import json

import pytest

from duotone.weights.methods.recipe import RECIPES, Recipe, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_survive_json(name):
    recipe = get_recipe(name)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"method": "hqq"}, "method must be one of"),
        ({"activation": "fp8"}, "activation must be one of"),
        ({"online": "random-signs"}, "online must be one of"),
        ({"split": True}, "split must be one of"),
        ({"parts": ("audio",)}, "parts must be some of"),
        ({"group": 7}, "even number"),
        ({"smooth": 2.0}, "between 0 and 1"),
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rank": 1}, r"Recipe has the fields .*; got \['rank'\]. Check the spelling"),
        ("w4a8", "a Recipe is a JSON object; got 'w4a8'"),
        ({"bits": {}}, r"bits must be one of .*; got \{\}"),
        ({"bits": True}, "bits must be one of .*; got True"),
        ({"method": ["rtn"]}, r"method must be one of .*; got \['rtn'\]"),
        ({"group": "64"}, "even number of channels; got '64'. None: one scale"),
        ({"smooth": "half"}, "smooth must be a number between 0 and 1; got 'half'"),
        ({"smooth": float("nan")}, "smooth must be a number between 0 and 1; got nan"),
        ({"ranges": "mse"}, r"Recipe has the fields .*; got \['ranges'\]. Check the spelling"),
        ({"clip": 1}, "clip must be a bool; got 1"),
        ({"pad": "no"}, "pad must be a bool; got 'no'"),
        ({"parts": "vision"}, "parts must be some of .*; got 'vision'. A list"),
        ({"parts": None}, "parts must be some of .*; got None"),
        ({"seed": -1}, "seed must be an integer >= 0; got -1"),
        ({"seed": 10**400}, "seed must be an integer >= 0"),
    ],
)
def test_data_that_are_no_recipe_are_refused_with_words(data, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(data)
    if isinstance(data, dict) and "rank" not in data:
        with pytest.raises(ValueError, match=message):
            Recipe().replace(**data)


def test_a_recipe_is_read_from_a_file_that_errors_name(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(RECIPES["mquant-w4a8"].to_json())
    assert Recipe.from_file(path) == RECIPES["mquant-w4a8"]
    for text in ("{", '{"bits": 4', '{"bits": 4, "bits": 8}', "[" * 10**5, '{"bits": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"recipe\.json: "):
            Recipe.from_file(path)
