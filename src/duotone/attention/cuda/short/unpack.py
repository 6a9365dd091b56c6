"""Dense K and V straight from spans in canonical order: one launch, no other scratch.

The plain-torch reference is `PackedTensor.dequantize`; numbers equal its own bit for bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.packing.inputs import INPUTS, MAX_CHANNELS
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.short.decode import ShortFormat, form_of
from duotone.attention.refused import RefusedError
from duotone.cache import PackedTensor
from duotone.cache.segments import PackedSegment

SOURCE = "short/unpack.cu"
THREADS = 128


class Side(ctypes.Structure):
    """`Side` of short/unpack.cu."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("codes", "numbers", "scale", "zero", "to")
    )

    @classmethod
    def of(cls, x: PackedTensor, to: Tensor) -> Side:
        """K or V, written to `to`."""
        tensors = (x.codes, x.classes, x.scale, x.zero_point, to)
        return cls(*(None if t is None else t.data_ptr() for t in tensors))


class Arguments(ctypes.Structure):
    """`Arguments` of short/unpack.cu."""

    _fields_ = (
        *((name, Side) for name in ("key", "value")),
        ("offsets", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("kv_heads", "spans", "tokens")),
    )


def check(segment: PackedSegment, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for spans, or a type of K and V, that the kernel does not know."""
    head_dim, value_dim = segment.head_dims
    fits = head_dim == value_dim <= MAX_CHANNELS and head_dim % 2 == 0 and dtype in INPUTS
    if not fits or segment.key.codes.shape[2] != segment.value.codes.shape[2]:
        raise RefusedError(
            f"short spans are dequantized with an even head_dim up to {MAX_CHANNELS} into one of "
            f"{[*INPUTS]}; got {head_dim}, {value_dim} and {dtype}"
        )
    tensors = [getattr(x, n) for x in (segment.key, segment.value) for n in x.tensor_names()]
    tensors.append(segment.value.blocks.offsets)
    if not all(x.is_contiguous() for x in tensors):
        raise RefusedError("packed K and V must be contiguous")


def short_unpack(segment: PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of short spans, [batch, kv_heads, tokens, head_dim] each.

    They are in their basis. Tokens past a sequence's end hold anything.
    Errors: `RefusedError` as `check`.
    """
    check(segment, dtype)
    key, value = segment.key, segment.value
    (batch, heads, tokens), spans = key.codes.shape[:3], value.blocks
    form = form_of(key.spec, value.spec, key.head_dim, spans.longest)
    size = (batch, heads, tokens, key.head_dim)
    dense = [key.codes.new_empty(size, dtype=dtype) for _ in "kv"]
    given = Arguments(
        Side.of(key, dense[0]), Side.of(value, dense[1]), spans.offsets.data_ptr(),
        heads, spans.blocks, tokens,
    )  # fmt: skip
    if key.codes.numel():
        launch = Launch(2 * batch * heads * spans.blocks, THREADS, 0)
        macros = macros_of(form, dtype)
        with torch.cuda.device(key.codes.device):
            kernel(SOURCE, "short_unpack", tuple(macros.items()), key.codes.device)(launch, given)
    return dense[0], dense[1]


def macros_of(form: ShortFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of short/unpack.cu."""
    return {
        "CHANNELS": form.head_dim,
        **form.key.macros("K"),
        **form.value.macros("V"),
        "INPUT": INPUTS[dtype],
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
