"""duotone: multimodal LLMs on few bits.

`import duotone` loads torch and nothing heavier; transformers and triton load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from duotone import quant as quant
from duotone.quant import SCHEMES as SCHEMES
from duotone.quant import CacheSpec as CacheSpec
from duotone.quant import Eviction as Eviction
from duotone.quant import KVSpec as KVSpec
from duotone.quant import LayerRule as LayerRule
from duotone.quant import Sharing as Sharing
from duotone.quant import TensorSpec as TensorSpec
from duotone.quant import scheme as scheme
from duotone.quant import schemes as schemes

if TYPE_CHECKING:
    from duotone import attention as attention
    from duotone import cache as cache
    from duotone import weights as weights
    from duotone.hf import QuantizedCache as QuantizedCache
    from duotone.hf import StaticQuantizedCache as StaticQuantizedCache
    from duotone.hf import enable as enable
    from duotone.planning import Plan as Plan
    from duotone.planning import plan as plan

__version__ = "0.1.0.dev0"

_LAZY = {
    "attention": ("duotone.attention", None),
    "cache": ("duotone.cache", None),
    "weights": ("duotone.weights", None),
    "QuantizedCache": ("duotone.hf", "QuantizedCache"),
    "StaticQuantizedCache": ("duotone.hf", "StaticQuantizedCache"),
    "enable": ("duotone.hf", "enable"),
    "Plan": ("duotone.planning", "Plan"),
    "plan": ("duotone.planning", "plan"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'duotone' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)
