"""Device facts for kernels: support, and the number of programs that run at one time."""

from __future__ import annotations

import importlib.util
import os

import torch

from duotone.tools.devices import facts

# Once: a compiler that traces a model cannot look for packages.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """True if Triton is installed and can use the device, or if its interpreter is on."""
    able = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return able and _HAS_TRITON


def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors; 1 where the interpreter runs programs one by one."""
    if device.type != "cuda":
        return 1
    return facts(device).multiprocessors
