"""Dense K and V straight from class records: one launch, no other scratch.

The plain-torch reference is `ClassRecords.canonical`, then `PackedTensor.dequantize`; numbers equal
theirs bit for bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.classes.slots import slots_of
from duotone.attention.cuda.packing.inputs import INPUTS
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.refused import RefusedError
from duotone.cache.segments import PackedSegment

SOURCE = "classes/unpack.cu"
THREADS = 256


class Side(ctypes.Structure):
    """`Side` of classes/unpack.cu."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "zero", "order", "to"))


class Arguments(ctypes.Structure):
    """`Arguments` of classes/unpack.cu."""

    _fields_ = (
        *((name, Side) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in ("packed_tiles", "token", "span")),
        *((name, ctypes.c_int) for name in ("kv_heads", "tiles", "stored", "tokens", "spans")),
    )


def check(form: ClassFormat, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for records, or a type of K and V, that the kernel does not write."""
    if form.head_dim % 2 or dtype not in INPUTS:
        raise RefusedError(
            f"class records are dequantized with an even head_dim into one of {[*INPUTS]}; got "
            f"{form.head_dim} and {dtype}"
        )


def class_unpack(segment: PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of tokens in class records, [batch, kv_heads, tokens, head_dim] each.

    They are in their basis. Tokens past a sequence's end hold anything.
    Errors: `RefusedError` as `check`.
    """
    records, spans = segment.records, segment.value.blocks
    form, data = records.format, records.data
    check(form, dtype)
    (batch, heads), slots = data.shape[:2], slots_of(spans, form.tokens)
    dense = [data.new_empty(batch, heads, spans.tokens, form.head_dim, dtype=dtype) for _ in "kv"]
    params = (
        (records.key_scale, records.key_zero, records.key_order),
        (records.value_scale, records.value_zero, records.value_order),
    )
    sides = (
        Side(*(None if x is None else x.data_ptr() for x in (*own, to)))
        for own, to in zip(params, dense, strict=True)
    )
    tiles = slots.place.shape[1] // form.tile_tokens
    given = Arguments(
        *sides, data.data_ptr(), slots.place.data_ptr(), slots.block_of_tile(spans).data_ptr(),
        heads, tiles, data.shape[2] * form.tiles, spans.tokens, records.value_scale.shape[2],
    )  # fmt: skip
    if batch * heads * tiles:
        macros = macros_of(form, dtype)
        with torch.cuda.device(data.device):
            run = kernel(SOURCE, "class_unpack", tuple(macros.items()), data.device)
            run(Launch(batch * heads * tiles, THREADS, 0), given)
    return dense[0], dense[1]


def macros_of(form: ClassFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of classes/unpack.cu."""
    return {
        "CHANNELS": form.head_dim,
        **form.widths,
        "INPUT": INPUTS[dtype],
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
        "TILE_BYTES": form.tile_bytes,
    }
