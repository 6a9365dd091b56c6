"""Kernel arguments of one segment: pointers, sizes, constants and the tile, from its specs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.attention.triton.classes import encode_classes
from duotone.cache.packed import PackedTensor
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.classes import class_counts
from duotone.quant.tensor_spec import BITS

# tl.dot wants 16 by 16 at least: the q heads of one kv head, and the bytes of one row of codes.
MIN_ROWS = 16
MIN_COLUMNS = 16
# Blocks of K of up to so many tiles share one loop over tiles, whose loads run ahead across blocks.
# It reads the folded q once per tile: a longer block has a loop of its own.
MAX_LOOP_TILES = 4
# What no block is longer than, where blocks are whole spans.
ANY_LENGTH = 1 << 30


def head_rows(group: int) -> dict[str, int]:
    """Constants of a kv head's q rows. group: q heads per kv head."""
    return {"G": group, "HP": max(MIN_ROWS, triton.next_power_of_2(group))}


def tile_config(
    bits: int,
    head_dim: int,
    *,
    block: int | None = None,
    groups: bool = False,
    signs: bool = False,
    exact: bool = False,
) -> dict[str, int]:
    """Tokens per tile, warps and pipeline stages; measured on an H200 (`duotone bench kernel`).

    bits: the wider of K and V, 16 if dense. head_dim: the larger of K's and V's (with classes of
        channels, the columns of the accumulators).
    block: the shortest group along tokens, if any: a longer tile would stay empty after it.
    groups: some tensor has groups along channels, whose values are built in registers.
    signs: some tensor has signs in addition to its codes. This case is not measured yet: the tile
        is one whose values all fit the registers, according to ptxas.
    exact: products in fp32, which run outside the matrix units.
    """
    # One warp needs no barriers, as long as its accumulators fit its registers.
    tokens, warps, stages = 64, max(1, triton.next_power_of_2(head_dim) // 128), 3
    if exact or bits == 16:
        tokens, warps, stages = 32, 4, 2
    elif signs:
        tokens, warps, stages = 32, max(4, 2 * warps) if groups else 2 * warps, 2
    elif groups:
        tokens, warps, stages = 32, warps if bits <= 2 else 4, 2
    elif bits == 8:
        tokens, warps, stages = 32, 2, 2
    if block is not None:
        tokens = min(tokens, max(16, triton.next_power_of_2(block)))
    return {"BN": tokens, "num_warps": warps, "num_stages": stages}


def arithmetic(query: Tensor, segment: Segment) -> dict[str, Any]:
    """Types of the products, and the tile that suits them."""
    tensors = (segment.key, segment.value)
    packed = isinstance(segment, PackedSegment)
    types = [query.dtype] if packed else [query.dtype, *(t.dtype for t in tensors)]
    exact = torch.float32 in types
    half = packed and not exact
    blocks = [block_tokens(t) for t in tensors]
    tile = tile_config(
        bits=max(_bits(t) for t in tensors),
        head_dim=max(_accumulators(t) for t in tensors),
        block=min((b for b in blocks if b), default=None),
        groups=any(kind_of(t) == "group" for t in tensors),
        signs=packed and any(t.spec.mapping != "asymmetric" for t in tensors),
        exact=exact,
    )
    return {
        "DT": tl.float16 if half else tl.float32,
        "UNIT": 2.0**24 if half else 1.0,
        "PRECISION": "ieee" if exact else "tf32",
        **tile,
    }


def operand(name: str, x: PackedTensor | Tensor) -> dict[str, Any]:
    """Kernel arguments of K or V (name "k" or "v"): pointers, sizes in rows, constants."""
    width = codes_of(x).shape[3]
    if isinstance(x, Tensor):
        pointers = dict.fromkeys(("_scale", "_zero", "_signs", "_modes", "_offsets")) | {"": x}
        rows = (x.stride(0) // width, x.stride(1) // width)
        blocks, columns, group = 0, 1, 1
    else:
        offsets = None if x.per_token else x.blocks.offsets.contiguous()
        pointers = {"": x.codes, "_scale": x.scale, "_offsets": offsets, **_mapping(x)}
        rows = (x.codes.shape[1] * x.tokens, x.tokens)
        blocks, columns = 0 if x.per_token else x.scale.shape[2], x.scale.shape[3] - x.has_bytes
        group = min(x.spec.group or x.head_dim, x.head_dim)
        if not x.per_token:
            group = x.spec.group or ANY_LENGTH
    constants = {
        "KIND": kind_of(x),
        "D": head_dim_of(x),
        "BITS": _slot_bits(x),
        "CLASSES": encode_classes(_counts(x)),
        "COLUMNS": columns,
        "GROUP": group,
        "WIDTH": width,
        "PAD": _pad(x),
    }
    return {
        **{f"p_{name}{part}": pointer for part, pointer in pointers.items()},
        f"{name}_batch_rows": rows[0],
        f"{name}_head_rows": rows[1],
        f"{name}_blocks": blocks,
        **{f"{name.upper()}_{constant}": value for constant, value in constants.items()},
    }


def _mapping(x: PackedTensor) -> dict[str, Tensor | None]:
    """Pointers in addition to codes and scales: see `triton.signs`."""
    if x.slot is None:
        return {"_zero": x.zero_point, "_signs": _units(x.negative), "_modes": None}
    return {"_zero": None, "_signs": _units(x.slot), "_modes": x.symmetric}


def _units(signs: Tensor | None) -> Tensor | None:
    """View rows of signs as 32-bit words, where rows are whole words."""
    if signs is None or signs.shape[-1] % 4 or signs.data_ptr() % 4:
        return signs
    return signs.view(torch.int32)


def loop_tiles(key: PackedTensor | Tensor, tile: int) -> int:
    """Tiles per block of K if its blocks are short enough for one loop over all of them, else 0."""
    tiles = -(-(block_tokens(key) or ANY_LENGTH) // tile)
    return tiles if tiles <= MAX_LOOP_TILES else 0


def kind_of(x: PackedTensor | Tensor) -> str:
    """KIND of x, the kernels' name of its storage: see `triton.tiles`."""
    if isinstance(x, Tensor):
        return "dense"
    if not x.per_token:
        return "block"
    return "token" if x.scale.shape[3] == 1 else "group"


def block_tokens(x: PackedTensor | Tensor) -> int | None:
    """Most tokens of a block of x, where its spec limits them."""
    return x.spec.group if kind_of(x) == "block" else None


def codes_of(x: PackedTensor | Tensor) -> Tensor:
    """The tensor with a row per token."""
    return x.codes if isinstance(x, PackedTensor) else x


def head_dim_of(x: PackedTensor | Tensor) -> int:
    """Channels of x."""
    return x.head_dim if isinstance(x, PackedTensor) else x.shape[-1]


def _counts(x: PackedTensor | Tensor) -> list[tuple[int, int]]:
    """[(bits, channels)] of the classes that have codes; empty where all channels are equal."""
    classes = isinstance(x, PackedTensor) and x.classes is not None
    return [c for c in class_counts(x.spec, x.head_dim) if all(c)] if classes else []


def code_widths(x: PackedTensor) -> list[int]:
    """Bits of the codes of x, by class."""
    return [bits for bits, _ in _counts(x)] or [x.spec.bits]


def _slot_bits(x: PackedTensor | Tensor) -> int:
    """Width of the narrowest code, which fixes the slots of a byte; 8 for a dense row, one slot."""
    return 8 if isinstance(x, Tensor) else min(code_widths(x))


def _pad(x: PackedTensor | Tensor) -> int:
    return max(MIN_COLUMNS, triton.next_power_of_2(codes_of(x).shape[3]))


def _bits(x: PackedTensor | Tensor) -> int:
    """Width for `tile_config`: with unequal channels the equal width of as many bytes."""
    if isinstance(x, Tensor):
        return 16
    if not _counts(x):
        return x.spec.bits
    return next(bits for bits in BITS if bits * x.head_dim >= 8 * x.codes.shape[3])


def _accumulators(x: PackedTensor | Tensor) -> int:
    """Columns of the accumulators of V: unequal channels leave some of them empty."""
    return 8 // _slot_bits(x) * _pad(x) if _counts(x) else head_dim_of(x)
