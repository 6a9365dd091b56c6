"""Sources of the decode kernels, and the devices that run them."""

from __future__ import annotations

from functools import cache

import torch

from duotone.tools.devices import facts
from duotone.tools.nvrtc import Kernel, Launch, PreparedLaunch, Sources, has_compiler

__all__ = [
    "Kernel",
    "Launch",
    "PreparedLaunch",
    "compiled",
    "entry",
    "has_kernels",
    "is_untried",
    "kernel",
    "missing",
    "refusal",
    "source_text",
]

MIN_CAPABILITY = (8, 0)
UNTRIED = "the CUDA kernels were never run on such a device; ask for them with impl='cuda'"
_SOURCES = Sources("duotone.attention.cuda")
source_text, compiled, kernel = _SOURCES.text, _SOURCES.compiled, _SOURCES.kernel
entry = _SOURCES.entry


def missing(device: torch.device) -> str | None:
    """Reason why kernels cannot be compiled or run here, or None."""
    if device.type != "cuda":
        return f"CUDA kernels need a CUDA device; the query is on {device}"
    if facts(device).capability < MIN_CAPABILITY:
        return "CUDA kernels need compute capability 8.0 (asynchronous copies)"
    if not has_compiler():
        return "CUDA kernels need `pip install duotone[cuda]` (cuda-core)"
    return None


def is_untried(device: torch.device) -> bool:
    """True where the kernels compile for a device but were never run on one."""
    return device.type != "cuda" or facts(device).capability[0] != 9


def refusal(device: torch.device, impl: str) -> str | None:
    """Reason why no CUDA kernel runs for `impl` on a device, or None."""
    if impl not in ("auto", "cuda"):
        return f"impl={impl!r} asks for others than the CUDA kernels"
    return missing(device) or (UNTRIED if impl == "auto" and is_untried(device) else None)


def has_kernels(device: torch.device) -> bool:
    """True where CUDA kernels can be compiled and run."""
    return device.type == "cuda" and _has_kernels(device)


@cache
def _has_kernels(device: torch.device) -> bool:
    return missing(device) is None
