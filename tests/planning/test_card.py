"""Plans of all memory: weights and a reserve first, caches in the rest."""

import pytest
import torch

import duotone
from duotone.loading import load_config
from duotone.planning.card import weight_bytes
from duotone.weights import get_recipe

from families import tiny_model

TOKENS = {"visual_tokens": 256, "text_tokens": 44}
SPEC = duotone.scheme("duotone")


def test_caches_get_what_weights_and_reserve_leave() -> None:
    config, memory = load_config(), 10**8
    made = duotone.plan(
        config, SPEC, **TOKENS, memory_bytes=memory, weights="rtn-w4a8", reserve_bytes=10**6
    )
    own, recipe = made.card.rows
    assert own.weights_bytes > 2 * recipe.weights_bytes
    for row in (own, recipe):
        assert row.caches_bytes == memory - 10**6 - row.weights_bytes
        alone = duotone.plan(config, SPEC, **TOKENS, budget_bytes=row.caches_bytes)
        assert (row.max_batch, row.dense_max_batch) == (alone.max_batch, alone.dense_max_batch)
    assert made.budget_bytes == recipe.caches_bytes
    assert made.max_batch == recipe.max_batch > own.max_batch
    assert made.to_dict()["card"]["rows"][1]["recipe"] == "rtn-w4a8"


def test_without_a_recipe_and_a_reserve_weights_are_as_they_are() -> None:
    model = tiny_model("internvl")
    made = duotone.plan(model, SPEC, **TOKENS, memory_bytes=10**7)
    (row,) = made.card.rows
    assert row.recipe == "none"
    # The head of this model is its embedding.
    assert row.weights_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert (made.card.reserve_bytes, made.card.reserve_is_assumed) == (10**6, True)


def test_a_config_counts_in_its_own_dtype() -> None:
    config = load_config()
    half = weight_bytes(config)
    config.dtype = torch.float32
    assert weight_bytes(config) == 2 * half


def test_weights_that_do_not_fit_leave_nothing() -> None:
    made = duotone.plan(tiny_model("internvl"), SPEC, **TOKENS, memory_bytes=10**4)
    assert (made.budget_bytes, made.max_batch, made.dense_max_batch) == (0, 0, 0)


def test_a_recipe_is_taken_as_it_is() -> None:
    recipe = get_recipe("rtn-w8a8")
    config = load_config()
    assert weight_bytes(config, recipe) == weight_bytes(config, "rtn-w8a8")
    made = duotone.plan(config, SPEC, **TOKENS, memory_bytes=10**8, weights=recipe)
    assert made.card.chosen.recipe == "recipe"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"memory_bytes": 10**8, "budget_bytes": 10**8}, "got both"),
        ({"weights": "rtn-w4a8"}, "add memory_bytes"),
        ({"reserve_bytes": 10**6, "budget_bytes": 10**8}, "add memory_bytes"),
        ({"memory_bytes": -1}, "integer >= 0"),
        ({"memory_bytes": 10**8, "weights": "rtn"}, "did you mean"),
    ],
)
def test_memory_that_says_nothing_is_refused(given: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        duotone.plan(load_config(), SPEC, **TOKENS, **given)


def test_a_checkpoint_of_another_library_is_not_counted_by_its_config() -> None:
    config = load_config()
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="quantized by another library"):
        weight_bytes(config)
