"""Bytes of a model's weights by shapes alone: as they are, and as a recipe will leave them.

A model without numbers goes through the recipe's equivalences and gets empty quantized linears, so
bytes are of the same tensors that `quantize_model` makes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from duotone.hf.weights.checkpoint import check_not_quantized, empty_model
from duotone.hf.weights.equivalences import apply_equivalences, equivalences_of, untie_head
from duotone.hf.weights.part_bytes import part_bytes
from duotone.hf.weights.quantizable import check
from duotone.hf.weights.units import Unit, units_of
from duotone.weights.equivalences.module_map import put
from duotone.weights.methods.observer import Linear, plan_of
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rule import HEAD
from duotone.weights.modules.quant_linear import QuantLinear


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of a model's state; a tied tensor counts once."""
    unique = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


@torch.no_grad()
def recipe_bytes(model: Any, recipe: Recipe) -> dict[str, int]:
    """{part: bytes} and "total" of what `quantize_model` makes of `model`, which stays as it is.

    Channel 0 of a linear counts in 16 bit where split="eq8" may leave it so: numbers decide, and
    bytes are at most so many.
    Errors: ValueError for a model or a size that the recipe cannot quantize.
    """
    check_not_quantized(model)
    bare = empty_model(copy.deepcopy(model.config), model.dtype)
    found = check(bare, recipe)
    if recipe.rotation or recipe.has_online:
        found = apply_equivalences(bare, equivalences_of(recipe))
    if HEAD in recipe.parts:
        untie_head(bare, found)
    for unit in units_of(bare, found, recipe.parts):
        linears = unit.linears(bare)
        for path, own in unit.recipes(bare, recipe).items():
            put(bare, unit.whole(path), _empty(unit, path, linears[path], own))
    return part_bytes(bare, found)


def _empty(unit: Unit, path: str, module: Linear, recipe: Recipe) -> QuantLinear:
    """The quantized linear without numbers, as `weights.methods.quantize` makes it."""
    linear = getattr(module, "linear", module)
    rows, columns = linear.weight.shape
    two = recipe.modality_scales and unit.part == "language"
    plan = plan_of(module)
    record = {
        "in_features": module.in_features,
        "out_features": rows,
        "columns": columns + -columns % (recipe.group or 2),
        "plan": None if plan is None else vars(plan),
        "bias": linear.bias is not None,
        "bits": recipe.bits,
        "group": recipe.group,
        "activation": recipe.activation,
        "scales": 0 if recipe.activation != "static" else 2 if two else 1,
        "split": recipe.split != "never" and path in unit.split,
    }
    with torch.device("meta"):
        return QuantLinear.from_record(record, linear.weight.dtype)
