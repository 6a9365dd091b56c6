"""Pack short spans by searched levels straight into canonical order.

Levels come first, as `classes.pack` finds them. One launch per tensor then writes codes and classes
of channels. The plain-torch reference is `SortedLevels.packed`; all bytes equal its own.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import WIDTHS, Classes
from duotone.attention.cuda.classes.levels import SortedLevels, States
from duotone.attention.cuda.classes.pack import sorted_levels
from duotone.attention.cuda.classes.small_levels import stored_levels
from duotone.attention.cuda.packing.inputs import INPUTS, Dense, dense
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.short.decode import Side
from duotone.cache import PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packing import in_basis
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.packing import packed_bytes

SOURCE = "short/pack.cu"
THREADS = 128


class Arguments(ctypes.Structure):
    """`Arguments` of short/pack.cu."""

    _fields_ = (
        ("x", Dense),
        *((name, ctypes.c_void_p) for name in (
            "offsets", "order", "scale", "zero", "codes", "numbers",
        )),
        *((name, ctypes.c_int) for name in ("kv_heads", "spans", "tokens")),
    )  # fmt: skip


def short_pack(key: States, value: States, spec: KVSpec, piece: Piece) -> PackedPair:
    """Quantize the tokens that `piece` takes out of K and V, without groups.

    The host waits as `classes.pack.class_pack` does.
    Errors: ValueError for numbers that are not finite and for levels beyond fp16.
    """
    return PackedPair(*(_packed(x, s, piece) for x, s in ((key, spec.key), (value, spec.value))))


def _packed(x: States, spec: TensorSpec, piece: Piece) -> PackedTensor:
    """K or V in canonical order."""
    taken = in_basis(piece.take.pick(x), spec)
    coded = Classes.of(spec, x.shape[3]).channels
    levels = sorted_levels(taken, spec, piece.spans, coded)
    scale, zero = stored_levels(levels, spec)
    codes, numbers = by_levels(taken, spec, levels)
    parts = {"scale": scale, "zero_point": zero, "codes": codes, "classes": numbers}
    return PackedTensor(spec, x.shape[3], x.dtype, levels.blocks, **parts)


def by_levels(x: States, spec: TensorSpec, levels: SortedLevels) -> tuple[Tensor, Tensor | None]:
    """(codes in canonical order, class numbers or None) of x, which is in its basis.

    Nothing here waits for the device; the launch can be captured.
    """
    (batch, heads), channels, blocks = x.shape[:2], x.shape[3], levels.blocks
    side, rows = Side.of(spec, channels), (*x.shape[:2], blocks.blocks)
    make = torch.empty if blocks.is_uniform else torch.zeros
    at = {"dtype": torch.uint8, "device": x.device}
    codes = make(batch, heads, blocks.tokens, side.row_bytes, **at)
    numbers = torch.empty(*rows, packed_bytes(channels, 2), **at) if side.ranked else None
    offsets = blocks.offsets.contiguous()
    given = Arguments(
        dense(x), offsets.data_ptr(), levels.order.data_ptr(), levels.chosen_scale.data_ptr(),
        levels.chosen_zero.data_ptr(), codes.data_ptr(),
        None if numbers is None else numbers.data_ptr(), heads, blocks.blocks, blocks.tokens,
    )  # fmt: skip
    if codes.numel():
        launch, macros = Launch(batch * heads * blocks.blocks, THREADS, 0), macros_of(side, x)
        with torch.cuda.device(x.device):
            kernel(SOURCE, "short_pack", tuple(macros.items()), x.device)(launch, given)
    return codes, numbers


def macros_of(side: Side, x: Tensor) -> dict[str, int]:
    """Macros of short/pack.cu."""
    return {
        "CHANNELS": x.shape[3],
        **{f"N{bits}": side.classes.width(bits) for bits in WIDTHS},
        "RANKED": int(side.ranked),
        "INPUT": INPUTS[x.dtype],
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
