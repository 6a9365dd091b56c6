"""Dense K and V of packed tiles of 64 tokens: the arguments of a launch, and the launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.packing.inputs import INPUTS
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.shared.slots import slots_of
from duotone.attention.cuda.shared.tiles import Tiled
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable

THREADS = 256
# Scales, zero-points and order of the channels of K or of V, as packing/dense.cuh has them.
Parameters = tuple[Tensor | None, Tensor | None, Tensor | None]


class Side(ctypes.Structure):
    """`Side` of packing/dense.cuh."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "zero", "order", "to"))


class Arguments(ctypes.Structure):
    """`Arguments` of packing/dense.cuh."""

    _fields_ = (
        *((name, Side) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in ("packed_tiles", "token", "span")),
        *((name, ctypes.c_int) for name in ("kv_heads", "tiles", "stored", "tokens", "spans")),
    )


def check(name: str, head_dim: int, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for heads, or a type of K and V, that no kernel writes.

    name: of the records.
    """
    if head_dim % 2 or dtype not in INPUTS:
        raise RefusedError(
            f"{name} are dequantized with an even head_dim into one of {[*INPUTS]}; got "
            f"{head_dim} and {dtype}"
        )


def unpack_tiles(
    source: str,
    entry: str,
    form: Tiled,
    data: Tensor,
    parameters: tuple[Parameters, Parameters],
    spans: BlockTable,
    dtype: torch.dtype,
    macros: dict[str, int],
) -> tuple[Tensor, Tensor]:
    """K and V of all tokens of records, [batch, kv_heads, tokens, head_dim] each.

    source, entry: the kernel. form: of the records `data`, [batch, kv_heads, records, bytes].
    parameters: of K and of V, with a row for each span. spans: their tokens. macros: of the kernel.
    Tokens past a sequence's end hold anything.
    """
    (batch, heads), slots = data.shape[:2], slots_of(spans, form.tokens)
    dense = [data.new_empty(batch, heads, spans.tokens, form.head_dim, dtype=dtype) for _ in "kv"]
    sides = (
        Side(*(None if x is None else x.data_ptr() for x in (*own, to)))
        for own, to in zip(parameters, dense, strict=True)
    )
    tiles = slots.place.shape[1] // form.tile_tokens
    given = Arguments(
        *sides, data.data_ptr(), slots.place.data_ptr(), slots.block_of_tile(spans).data_ptr(),
        heads, tiles, data.shape[2] * form.tiles, spans.tokens, parameters[1][0].shape[2],
    )  # fmt: skip
    if batch * heads * tiles:
        with torch.cuda.device(data.device):
            run = kernel(source, entry, tuple(macros.items()), data.device)
            run(Launch(batch * heads * tiles, THREADS, 0), given)
    return dense[0], dense[1]


def macros_of(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Macros of packing/dense.cuh and packing/device.cuh."""
    return {
        "CHANNELS": head_dim,
        "INPUT": INPUTS[dtype],
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
