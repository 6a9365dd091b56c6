"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends.

A kernel lets its successor start as soon as all of its own programs have started. A kernel waits
for its predecessor before it reads the predecessor's output, or writes anything at all. Before the
wait, a kernel may only read memory that no kernel of a forward pass writes: weights, tables. As
every kernel waits, a kernel that waits for one has waited for all before it. Kernels that do not
take part are waited for as usual.
"""

# ruff: noqa: D103
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl

from duotone.tools.devices import facts
from duotone.weights.kernels.triton.unpack import ASM


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


# The innermost `overlap_if` is last.
_allowed = [True]


@contextmanager
def overlap_if(allowed: bool) -> Iterator[None]:
    """Set whether launches within the block overlap, for comparisons."""
    _allowed.append(allowed)
    try:
        yield
    finally:
        _allowed.pop()


def overlaps(device: torch.device) -> bool:
    """True if launches on this device overlap."""
    return _allowed[-1] and _able(device)


@cache
def _able(device: torch.device) -> bool:
    if device.type != "cuda" or not ASM or not torch.cuda.is_available():
        return False
    return facts(device).capability[0] >= 9
