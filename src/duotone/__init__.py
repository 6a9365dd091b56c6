"""duotone: multimodal LLMs on few bits.

`import duotone` loads nothing; torch, transformers and triton load with the first name that needs
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duotone import attention as attention
    from duotone import cache as cache
    from duotone import hf as hf
    from duotone import loading as loading
    from duotone import models as models
    from duotone import quant as quant
    from duotone import quantize as quantize
    from duotone import tasks as tasks
    from duotone import tune as tune
    from duotone import weights as weights
    from duotone.calibrate import calibrated as calibrated
    from duotone.hf import QuantizedCache as QuantizedCache
    from duotone.hf import enable as enable
    from duotone.hf import recommend as recommend
    from duotone.hf import supports as supports
    from duotone.planning.memory import Plan as Plan
    from duotone.planning.memory import plan as plan
    from duotone.quant import SCHEMES as SCHEMES
    from duotone.quant import CacheSpec as CacheSpec
    from duotone.quant import Eviction as Eviction
    from duotone.quant import KVSpec as KVSpec
    from duotone.quant import LayerRule as LayerRule
    from duotone.quant import Sharing as Sharing
    from duotone.quant import TensorSpec as TensorSpec
    from duotone.quant import scheme as scheme
    from duotone.quant import schemes as schemes
    from duotone.tools.slow_paths import SlowPathWarning as SlowPathWarning

__version__ = "0.2.0"

_MODULES = (
    *("attention", "cache", "hf", "loading", "models"),
    *("quant", "quantize", "tasks", "tune", "weights"),
)
# {name: the module that has it}
_NAMES = {
    "SCHEMES": "quant",
    "CacheSpec": "quant",
    "Eviction": "quant",
    "KVSpec": "quant",
    "LayerRule": "quant",
    "Plan": "planning",
    "QuantizedCache": "hf",
    "Sharing": "quant",
    "SlowPathWarning": "tools.slow_paths",
    "TensorSpec": "quant",
    "calibrated": "calibrate",
    "enable": "hf",
    "plan": "planning",
    "recommend": "hf",
    "scheme": "quant",
    "schemes": "quant",
    "supports": "hf",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'duotone' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_NAMES, "__version__"})
