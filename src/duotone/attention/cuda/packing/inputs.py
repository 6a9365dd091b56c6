"""Dense K and V as packing kernels read them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.refused import RefusedError

INPUTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
MAX_CHANNELS = 256
# Tokens that a warp has in shared memory, and bytes between their rows.
TILE_TOKENS, ROW_GAP_BYTES = 32, 16


class Dense(ctypes.Structure):
    """`Dense` of packing/tile.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("batch", "head")),
        ("token", ctypes.c_int),
    )


def check_readable(*states: Tensor) -> None:
    """Raise `RefusedError` for dense K and V, or one of them, that no kernel reads."""
    alike = len({(x.shape, x.dtype, x.device) for x in states}) <= 1
    close = all(x.stride(3) == 1 and x.shape[3] <= MAX_CHANNELS for x in states)
    if not alike or not close or not all(x.dtype in INPUTS for x in states):
        raise RefusedError(
            f"dense K and V must agree and have up to {MAX_CHANNELS} consecutive channels of "
            f"{list(INPUTS)}; got {' and '.join(f'{tuple(x.shape)} {x.dtype}' for x in states)}"
        )


def tile_bytes(channels: int, dtype: torch.dtype) -> int:
    """Shared memory of 32 tokens, as packing/tile.cuh has them."""
    return TILE_TOKENS * (channels * dtype.itemsize + ROW_GAP_BYTES)


def alignment(x: Tensor) -> int:
    """Bytes, 16 at most, that every row of x [batch, kv_heads, tokens, head_dim] is aligned to."""
    places = [x.data_ptr(), x.shape[3] * x.itemsize, *(s * x.itemsize for s in x.stride()[:3])]
    return next(n for n in (16, 8, 4, 2, 1) if all(place % n == 0 for place in places))


def dense(x: Tensor) -> Dense:
    """Dense K or V as the kernel receives it: strides in bytes."""
    return Dense(x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:3]))
