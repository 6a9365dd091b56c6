"""Checks of a model and a recipe before anything is done: words of every refusal."""

from __future__ import annotations

from typing import Any

from torch import nn

from duotone.hf.weights.checkpoint import check_not_quantized
from duotone.hf.weights.equivalences import check_norms, check_sizes, equivalences_of
from duotone.hf.weights.reorder import check_reorderable
from duotone.hf.weights.units import units_of
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.module_map import WeightMap, at
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rule import HEAD, ROLES
from duotone.weights.modules.product_checks import OUTPUTS


def check(model: Any, recipe: Recipe) -> WeightMap:
    """The model's map. Errors: ValueError for a model that this recipe cannot quantize."""
    check_not_quantized(model)
    found = weight_map(model)
    if model.dtype not in OUTPUTS:
        raise ValueError(
            f"quantized linears compute in one of {OUTPUTS}, got a model in {model.dtype}; load it "
            "with dtype=torch.float32"
        )
    _check_rules(model, found, recipe)
    check_sizes(model, found, equivalences_of(recipe))
    if recipe.smooth is not None or recipe.method == "awq" or recipe.rotation:
        check_norms(model, found)
    if recipe.visual_first:
        check_reorderable(model)
    return found


def _check_rules(model: Any, found: WeightMap, recipe: Recipe) -> None:
    """Errors: ValueError naming a rule whose parts have linears of which it covers none."""
    units = units_of(model, found, recipe.parts)
    known = [(u.whole(path), u.role(path), u.part) for u in units for path in u.linears(model)]
    for rule in recipe.rules:
        near = [one for one in known if one[2] in rule.parts]
        if near and not any(rule.covers(*one) for one in near):
            path, role, part = near[0]
            raise ValueError(
                f"a rule must cover a linear of its parts, got {rule.linears!r} for "
                f"{len(near)} linears in {', '.join(rule.parts)}, the first of them {path!r} "
                f"({role} in {part}). Name a path with * and ?, or a role of {ROLES}"
            )
    if HEAD in recipe.parts and not isinstance(at(model, found.head), nn.Linear):
        raise ValueError(f"a head must be a linear, got {type(at(model, found.head)).__name__}")
