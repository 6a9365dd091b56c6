"""Attention over more keys merged into sums in fp32, in place: one launch.

The plain-torch reference, with equal arguments, is `merged_by_torch`.
"""

from __future__ import annotations

import ctypes
import math

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.attention.cuda.packing.inputs import INPUTS
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.merge import merge_partials

SOURCE = "shared/merge_into.cu"
WARPS = 8
Rows = Float[Tensor, "tokens heads head_dim"]
Lse = Float[Tensor, "heads tokens"]


class Arguments(ctypes.Structure):
    """`Arguments` of merge_into.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "lse", "part", "part_lse")),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "lse_tokens")),
    )


def merge_into(sums: Rows, lse: Lse, part: Rows, part_lse: Lse) -> None:
    """Make `sums` and `lse`, in fp32, attention over the keys of both.

    part: as FlashAttention returns it, contiguous; where it has no key, its lse is infinite. lse:
    may be a slice of the tokens of a longer one.
    """
    tokens, heads, width = sums.shape
    given = Arguments(
        **{
            name: x.data_ptr()
            for name, x in (("sums", sums), ("lse", lse), ("part", part), ("part_lse", part_lse))
        },
        tokens=tokens,
        heads=heads,
        lse_tokens=lse.stride(0),
    )
    macros = macros_of(width, part.dtype)
    launch = Launch(-(-tokens * heads // WARPS), WARPS * 32, 0)
    with torch.cuda.device(sums.device):
        kernel(SOURCE, "merge_into", tuple(macros.items()), sums.device)(launch, given)


def merged_by_torch(sums: Rows, lse: Lse, part: Rows, part_lse: Lse) -> None:
    """Reference of `merge_into`."""
    none = part_lse.isinf()
    both = ((sums, lse.T), (part.float(), part_lse.masked_fill(none, -math.inf).T))
    merged, total = merge_partials(both)
    sums.copy_(merged)
    lse.copy_(total.T)


def macros_of(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Macros of merge_into.cu. width: head_dim."""
    return {
        "CHANNELS": width,
        "INPUT": INPUTS[dtype],
        "WARPS": WARPS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
