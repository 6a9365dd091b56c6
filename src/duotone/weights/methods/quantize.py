"""Quantization of one linear by a recipe: its statistics in, a QuantLinear out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.equivalences.outlier_split import split_channel0
from duotone.weights.methods.gptq import gptq
from duotone.weights.methods.observer import (
    TEXT,
    VISUAL,
    Linear,
    Statistics,
    Wanted,
    plan_of,
)
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rtn import packed, padded, round_to_nearest
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quant_linear import QuantLinear

HIGHEST_CODE = 127


def wanted_by(*recipes: Recipe) -> Wanted:
    """Statistics of linears' inputs that some of these recipes need."""
    return Wanted(
        limits=any(recipe.activation == "static" for recipe in recipes),
        moments=any(recipe.method != "rtn" for recipe in recipes),
    )


@dataclass(frozen=True)
class Outcome:
    """A quantized linear, and its line of the report (JSON-safe)."""

    linear: QuantLinear
    report: dict[str, Any]


@torch.no_grad()
def quantize_linear(
    module: Linear,
    statistics: Statistics,
    recipe: Recipe,
    *,
    split: bool = False,
    two_scales: bool = False,
    modality: Modality | None = None,
) -> Outcome:
    """The linear on integers. split: channel 0 stays floating point.

    two_scales: one static scale per modality; where no visual token was seen, both are the text's.
    """
    linear = module.linear if isinstance(module, RotatedInput) else module
    weight, first = padded(linear.weight.detach(), recipe.group), None
    if split:
        apart = split_channel0(weight)
        weight, first = apart.main, apart.column
    weights, report = _codes(weight, statistics, recipe, first)
    scales = _scales(statistics, recipe, two_scales)
    made = QuantLinear(
        weights,
        None if linear.bias is None else linear.bias.detach().clone(),
        in_features=module.in_features,
        activation=recipe.activation,
        scales=None if scales is None else scales.to(weight.device),
        modality=modality,
        plan=plan_of(module),
    )
    return Outcome(made, report | _range_report(statistics, scales))


def _codes(
    weight: Tensor, statistics: Statistics, recipe: Recipe, first: Tensor | None
) -> tuple[PackedWeight, dict[str, Any]]:
    if recipe.method == "rtn":
        codes, scale = round_to_nearest(weight, recipe.bits, recipe.group, recipe.clip)
        return packed(codes, scale, recipe.bits, first), {}
    moments = _fitted_moments(statistics, weight.shape[1], first is not None)
    if recipe.method == "awq":
        given = (weight, recipe.bits, recipe.group, recipe.clip, moments)
        return packed(*round_to_nearest(*given), recipe.bits, first), {}
    found = gptq(weight, moments, recipe.bits, recipe.group, clip=recipe.clip)
    report = {"damping": found.damping, "error": found.error, "error_rtn": found.error_rtn}
    return packed(found.codes, found.scale, recipe.bits, first), report


def _fitted_moments(statistics: Statistics, columns: int, split: bool) -> Tensor:
    """Moments of the padded weight's columns; the split one makes no error."""
    if statistics.moments is None:
        raise ValueError(
            "GPTQ and AWQ need second moments of the inputs, got none; observe them first"
        )
    missing = columns - len(statistics.moments)
    moments = F.pad(statistics.moments, (0, missing, 0, missing))
    if split:
        moments[0], moments[:, 0] = 0, 0
    return moments


def _scales(statistics: Statistics, recipe: Recipe, two: bool) -> Tensor | None:
    """float32 [text, visual], [one], or None: the largest magnitude over the highest code.

    Zeros alone get 1 over the highest code.
    """
    if recipe.activation != "static":
        return None
    seen = statistics.limits
    if not seen:
        raise ValueError("static scales need activations to look at, got none; add samples")
    limits = [max(seen.values())]
    if two:
        limits = [seen.get(name, next(iter(seen.values()))) for name in (TEXT, VISUAL)]
    return torch.tensor([(limit or 1.0) / HIGHEST_CODE for limit in limits])


def _range_report(statistics: Statistics, scales: Tensor | None) -> dict[str, Any]:
    found = {"tokens": dict(statistics.tokens)}
    if scales is not None:
        found |= {"scales": scales.tolist(), "largest": dict(statistics.limits)}
    return found


def linears_of(module: nn.Module) -> dict[str, Linear]:
    """{path: module} of the linears of a unit, online transforms included."""
    found: dict[str, Linear] = {}
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(child, (nn.Linear, RotatedInput)) and not inside:
            found[path] = child
    return found
