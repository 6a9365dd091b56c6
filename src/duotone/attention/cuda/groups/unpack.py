"""Dense K and V straight from group records, of pages by number or of a stream: one launch.

The plain-torch reference is `GroupRecords.canonical`, then `PackedTensor.dequantize`; numbers equal
theirs bit for bit.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.groups.format import TILE, GroupFormat
from duotone.attention.cuda.packing.inputs import INPUTS
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.refused import RefusedError
from duotone.cache.segments import PackedSegment

SOURCE = "groups/unpack.cu"
THREADS = 256
# Channels of a token that a thread writes.
CHANNELS = 8


class Separate(ctypes.Structure):
    """`Separate` of groups/unpack.cu."""

    _fields_ = (("codes", ctypes.c_void_p), ("head_bytes", ctypes.c_longlong))

    @classmethod
    def of(cls, codes: Tensor | None) -> Separate:
        """Codes [batch, kv_heads, tiles, bytes]; None: they are in the records."""
        return cls() if codes is None else cls(codes.data_ptr(), codes.shape[2:].numel())


class Arguments(ctypes.Structure):
    """`Arguments` of groups/unpack.cu."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("to", ctypes.c_void_p * 2),
        ("key", Separate),
        ("value", Separate),
        ("kv_heads", ctypes.c_int),
        ("head_pages", ctypes.c_int),
    )


def check(form: GroupFormat, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for records, or a type of K and V, that the kernel does not know."""
    if dtype not in INPUTS or form.head_dim % CHANNELS:
        raise RefusedError(
            f"group records are dequantized into one of {[*INPUTS]}, with head_dim a multiple of "
            f"{CHANNELS}; got {dtype} and {form.head_dim}"
        )


def stream_unpack(segment: PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of a stream in group records, [batch, kv_heads, tokens, head_dim] each.

    They are in their basis. Tokens past a sequence's end hold anything.
    Errors: `RefusedError` as `check`, and for records without codes that another layer keeps.
    """
    form, data, tokens = segment.records.format, segment.records.data, segment.tokens
    check(form, dtype)
    codes = segment.records.codes
    needed = [data, *(x for x, at in zip(codes, (form.key, form.value), strict=True) if at.apart)]
    if not all(x is not None and x.is_contiguous() for x in needed):
        raise RefusedError("group records need contiguous tensors, with the codes that are shared")
    # A record of a head is a page.
    pool = data.flatten(0, 2).unsqueeze(1)
    numbers = torch.arange(len(pool), dtype=torch.int32, device=data.device)
    shape = (2, *data.shape[:2], data.shape[2] * form.tokens, form.head_dim)
    dense = data.new_empty(shape, dtype=dtype)
    _launch(form, pool, numbers, *dense.view(2, -1, 1, form.head_dim), codes, data.shape[2])
    return dense[0, :, :, :tokens], dense[1, :, :, :tokens]


def group_unpack(
    form: GroupFormat,
    pool: UInt8[Tensor, "pool_pages kv_heads bytes"],
    pages: Int[Tensor, " pages"],
    key: Float[Tensor, "tokens kv_heads head_dim"],
    value: Float[Tensor, "tokens kv_heads head_dim"],
) -> None:
    """Write K and V of whole pages, in their order.

    pages: int32, numbers in the pool. key, value: as many tokens as the pages hold, contiguous.
    Errors: ValueError for shapes or types that do not fit, `RefusedError` as `check`.
    """
    check(form, key.dtype)
    shape = (len(pages) * form.tokens, pool.shape[1], form.head_dim)
    fits = key.shape == value.shape == shape and key.dtype == value.dtype
    fits = fits and key.is_contiguous() and value.is_contiguous()
    if not fits or pages.dtype != torch.int32 or not pages.is_contiguous():
        raise ValueError(
            f"key and value must be contiguous {shape} of one type and pages int32; got "
            f"{tuple(key.shape)} {key.dtype}, {tuple(value.shape)} {value.dtype}, {pages.dtype}."
        )
    if pool.shape[2] != form.own_nbytes or not pool.is_contiguous():
        raise ValueError(
            f"the pool must hold contiguous pages of {form.own_nbytes} bytes; got "
            f"{tuple(pool.shape)}."
        )
    _launch(form, pool, pages, key, value)


def _launch(
    form: GroupFormat,
    pool: Tensor,
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    codes: tuple[Tensor | None, Tensor | None] = (None, None),
    head_pages: int = 1,
) -> None:
    """codes: of K and of V that are not in pages, which then are a head's, `head_pages` each."""
    if not len(pages):
        return
    given = Arguments(
        pool.data_ptr(),
        pages.data_ptr(),
        (ctypes.c_void_p * 2)(key.data_ptr(), value.data_ptr()),
        *map(Separate.of, codes),
        pool.shape[1],
        head_pages,
    )
    macros = macros_of(form, key.dtype)
    launch = Launch(len(pages) * pool.shape[1], THREADS, form.nbytes)
    with torch.cuda.device(pool.device):
        kernel(SOURCE, "group_unpack", tuple(macros.items()), pool.device)(launch, given)


def macros_of(form: GroupFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of groups/unpack.cu."""
    return {
        "CHANNELS": form.head_dim,
        **form.key.macros("K"),
        **form.value.macros("V"),
        "K_MAPPING": int(form.key.signs),
        "V_MAPPING": int(form.value.signs),
        "INPUT": INPUTS[dtype],
        "TILES": form.tokens // TILE,
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
        "PAGE_BYTES": form.own_nbytes,
    }
