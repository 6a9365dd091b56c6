"""Append a token to the tail of every sequence and pack the pages that become full, in one launch.

The plain-torch reference is `serve.pages.append_tokens`, whose pages are equal bit for bit.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.groups import tail
from duotone.attention.cuda.groups.format import TILE, GroupFormat
from duotone.attention.cuda.groups.pack import check, macros_of
from duotone.attention.cuda.shared.launch import OVERLAP
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.spans.layout import LANES
from duotone.attention.refused import RefusedError
from duotone.quant import KVSpec

SOURCE = "groups/append.cu"
VECTOR_BYTES = 16
# Of a warp's two steps, which fill the same words.
STEP_CHANNELS = 32
Token = Float[Tensor, "batch kv_heads head_dim"]


class Arguments(ctypes.Structure):
    """`Arguments` of groups/append.cu."""

    _fields_ = (
        ("new", ctypes.c_void_p * 2),
        *((name, ctypes.c_longlong * 2) for name in ("new_batch", "new_head")),
        *((name, ctypes.c_void_p) for name in ("pool", "tail_pages", "full", "position")),
        *((name, ctypes.c_int) for name in ("batch", "kv_heads")),
        *((name, ctypes.c_float * 2) for name in ("shrink", "eta", "rest")),
    )


def group_append(
    key: Token,
    value: Token,
    pool: UInt8[Tensor, "pages kv_heads nbytes"],
    tail_pages: Int[Tensor, "batch pages_per_tail"],
    full: Int[Tensor, " batch"],
    position: Int[Tensor, " batch"],
    form: GroupFormat,
    specs: KVSpec,
) -> None:
    """Write a token of each sequence into its tail; pack the page that becomes full by it.

    tail_pages: int32, as `Tail.pages`. full: int32, the page; 0, that of nobody, packs nothing.
    position: int64, of the token; below 0: it is not kept. What `refuse` says must hold. Nothing
    here waits for the device; the launch can be captured.
    """
    key, value = aligned(key), aligned(value)
    own = macros(form, specs, key.dtype, tail_pages.shape[1])
    batch, heads, _ = key.shape
    numbers, both = ctypes.c_float * 2, (specs.key, specs.value)
    given = Arguments(
        new=(ctypes.c_void_p * 2)(key.data_ptr(), value.data_ptr()),
        new_batch=_strides(key, value, 0),
        new_head=_strides(key, value, 1),
        pool=pool.data_ptr(),
        tail_pages=tail_pages.data_ptr(),
        full=full.data_ptr(),
        position=position.data_ptr(),
        batch=batch,
        kv_heads=heads,
        shrink=numbers(*(spec.shrink for spec in both)),
        eta=numbers(*(spec.eta for spec in both)),
        rest=numbers(*(1 - 2 * spec.eta for spec in both)),
    )
    blocks, threads = 2 * batch * heads * form.tiles, own["WARPS"] * LANES
    launch = Launch(blocks, threads, own["TILE_SHARED_BYTES"], overlap=OVERLAP)
    if blocks:
        with torch.cuda.device(key.device):
            kernel(SOURCE, "group_append", tuple(own.items()), key.device)(launch, given)


def macros(form: GroupFormat, specs: KVSpec, dtype: torch.dtype, tail_pages: int) -> dict[str, int]:
    """Macros of groups/append.cu."""
    warps = form.head_dim // STEP_CHANNELS
    return macros_of(form, specs, dtype, decoding=True) | {
        "WARPS": warps,
        "SHARERS": warps,
        "ALIGN": VECTOR_BYTES,
        "NORM": 0,
        "TILES": form.tiles,
        "TAIL_PAGES": tail_pages,
        "OVERLAP": int(OVERLAP),
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }


def refuse(form: GroupFormat, specs: KVSpec, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for pages that the kernel does not pack. dtype: of K and V."""
    check(specs)
    tail.check(form, dtype)
    both = (specs.key, specs.value)
    if any((x.group, x.mapping, x.bits > 1) != (TILE, "asymmetric", True) for x in both):
        raise RefusedError(f"pages have groups of {TILE} with zero-points; got {both}")


def aligned(x: Token) -> Token:
    """Return x where its rows can be read in vectors, else a copy of adjacent rows."""
    places = (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:2]))
    is_read = x.stride(2) == 1 and not any(place % VECTOR_BYTES for place in places)
    # A plain clone would keep the strides of dense numbers.
    return x if is_read else x.clone(memory_format=torch.contiguous_format)


def _strides(key: Token, value: Token, axis: int) -> ctypes.Array:
    return (ctypes.c_longlong * 2)(*(x.element_size() * x.stride(axis) for x in (key, value)))
