"""Round levels to rows of 8 bits on the device, in one launch a tensor.

The plain-torch reference is `SortedLevels.parameters`; all bytes of finite rows equal its own.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import WIDTHS, Classes
from duotone.attention.cuda.classes.levels import SortedLevels
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.spans.layout import LANES
from duotone.quant import TensorSpec

SOURCE = "classes/small_levels.cu"
WARPS = 4


class Arguments(ctypes.Structure):
    """`Arguments` of classes/small_levels.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scale", "zero", "scale_row", "zero_row")),
        ("rows", ctypes.c_int),
    )


def stored_levels(levels: SortedLevels, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Scales and zero-points as a spec stores them, by the kernel where it is 8 bits on a GPU."""
    if spec.param_dtype != "float8" or not levels.scale.is_cuda:
        return levels.parameters(spec)
    return small_rows(levels, spec)


def small_rows(levels: SortedLevels, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Rows of scales and of middles of levels of all blocks. Nothing here waits for the device."""
    scale, zero = levels.scale, levels.zero
    made = [x.new_empty((*x.shape[:3], x.shape[3] + 1), dtype=torch.uint8) for x in (scale, zero)]
    rows = zero[..., 0].numel()
    given = Arguments(*(x.data_ptr() for x in (scale, zero, *made)), rows)
    macros = macros_of(Classes.of(spec, zero.shape[3]), zero.shape[3])
    if rows:
        with torch.cuda.device(zero.device):
            at = Launch(-(-rows // WARPS), WARPS * LANES, 0)
            kernel(SOURCE, "small_levels", tuple(macros.items()), zero.device)(at, given)
    return made[0], made[1]


def macros_of(classes: Classes, head_dim: int) -> dict[str, int]:
    """Macros of classes/small_levels.cu."""
    return {
        "CHANNELS": head_dim,
        **{f"N{bits}": classes.width(bits) for bits in WIDTHS},
        "INPUT": 0,
        "WARPS": WARPS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
