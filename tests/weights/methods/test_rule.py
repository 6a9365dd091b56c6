import json

import pytest

from duotone.weights.methods.recipe import RECIPES, Recipe
from duotone.weights.methods.rule import ALL_PARTS, LinearRule

DOWN = "model.language_model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*.down_proj:bits=8", LinearRule("*.down_proj", bits=8)),
        (
            "language/mlp_output:activation=dynamic,clip=false",
            LinearRule("mlp_output", ("language",), activation="dynamic", clip=False),
        ),
        ("head/*:bits=8,method=rtn", LinearRule("*", ("head",), bits=8, method="rtn")),
    ],
)
def test_rules_are_read_from_words_and_survive_json(text, rule):
    assert LinearRule.from_text(text) == rule
    assert LinearRule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


@pytest.mark.parametrize(
    "text",
    ["", "*", "*:", ":bits=8", "/*:bits=8", "*:bits", "*:bits=", "*:group=8", "*:parts=head"],
)
def test_words_that_are_no_rule_are_refused_with_the_syntax(text):
    with pytest.raises(ValueError, match=r"a rule is \[PART/\]LINEARS:FIELD=VALUE"):
        LinearRule.from_text(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, r"bits must be one of \(4, 8, 16\); got 3"),
        ({"bits": True}, "bits must be one of"),
        ({"method": "awq"}, "method must be one of"),
        ({"activation": "fp8"}, "activation must be one of"),
        ({"clip": 1}, "clip must be a bool"),
        ({"linears": "", "bits": 8}, "must be a pattern"),
        ({"parts": ("audio",), "bits": 8}, "a rule's parts must be some of"),
        ({}, "must change one of"),
        ({"bits": 16, "activation": "dynamic"}, "has nothing else to choose"),
        ({"width": 8}, "LinearRule has the fields"),
    ],
)
def test_rules_without_a_meaning_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        LinearRule(**given)
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({"rules": [given]})


def test_paths_and_roles_are_matched_within_the_parts():
    by_path, by_role = LinearRule("*.down_proj", bits=8), LinearRule("mlp_output", bits=8)
    for part in ALL_PARTS:
        assert by_path.covers(DOWN, "mlp_output", part)
        assert by_role.covers("encoder.0.fc2", "mlp_output", part)
    assert not by_path.covers("encoder.0.fc2", "mlp_output", "vision")
    assert not LinearRule("*", ("vision",), bits=8).covers(DOWN, "mlp_output", "language")


def test_the_later_rule_wins_and_its_linear_has_one_scale_if_it_is_not_static():
    recipe = RECIPES["mquant-w4a8"].replace(
        rules=(
            LinearRule("*", ("language",), bits=16),
            LinearRule("mlp_*", bits=8, activation="dynamic"),
            LinearRule("mlp_input", activation="none"),
        )
    )
    assert recipe.of("x.q_proj", "attention_input", "language") is None
    output, inner = recipe.of(DOWN, "mlp_output", "language"), recipe.of("u", "mlp_input", "vision")
    assert (output.bits, output.activation, output.modality_scales) == (8, "dynamic", False)
    assert (output.split, inner.split, inner.activation) == ("eq8", "never", "none")
    rest = recipe.of("x.q_proj", "attention_input", "vision")
    assert rest == RECIPES["mquant-w4a8"]


def test_a_rule_that_a_recipe_cannot_follow_is_refused_at_once():
    with pytest.raises(ValueError, match="a recipe's rules must be a list"):
        Recipe(rules="*:bits=8")
    with pytest.raises(ValueError, match="a LinearRule is a JSON object"):
        Recipe(rules=("*:bits=8",))
