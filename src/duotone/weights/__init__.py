"""Weights and activations on few bits: what makes a linear layer cheap without changing a model.

This room knows tensors and `torch.nn` modules, never transformers: which module plays which part
is told by `weights.structure`, and `hf.weight_maps` fills that in per family. A whole model is
quantized by `duotone.mquant`; `quantize_model` here is the same function, for one door to weights.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duotone.weights.recipe import RECIPES as RECIPES
    from duotone.weights.recipe import Recipe as Recipe
    from duotone.weights.recipe import get_recipe as get_recipe

_LAZY = {
    "RECIPES": "duotone.weights.recipe",
    "Recipe": "duotone.weights.recipe",
    "get_recipe": "duotone.weights.recipe",
    "quantize_model": "duotone.mquant",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'duotone.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
