"""Few-bit weights and activations: cheap linear layers that keep a model's function.

This room knows tensors and `torch.nn` modules, never transformers.
`weights.equivalences.module_map` describes the part of each module, and `hf.weights.weight_maps`
fills it in per family. `duotone.quantize` quantizes a whole model; `quantize_model` here is its
function, for one door.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duotone.weights.methods.recipe import RECIPES as RECIPES
    from duotone.weights.methods.recipe import Recipe as Recipe
    from duotone.weights.methods.recipe import get_recipe as get_recipe
    from duotone.weights.methods.rule import LinearRule as LinearRule

_LAZY = {
    "RECIPES": "duotone.weights.methods.recipe",
    "Recipe": "duotone.weights.methods.recipe",
    "get_recipe": "duotone.weights.methods.recipe",
    "LinearRule": "duotone.weights.methods.rule",
    "quantize_model": "duotone.quantize",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'duotone.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
