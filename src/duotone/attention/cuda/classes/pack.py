"""Pack tokens whose channels have unequal bits straight into class records.

Levels and the order of channels come first: their statistics are of all tokens of a block, and
Lloyd's of many rounds over them (`level_search`; torch finds what that does not cover). One launch
then reads K and V once and writes the codes where the decode kernel wants them, without any
canonical packing between.

The plain-torch reference is `PackedPair.pack`, then `classes.layout.class_layout`; on a GPU all
bytes equal those that torch writes by the same levels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.cuda.classes.format import COLUMN, ClassFormat, format_of
from duotone.attention.cuda.classes.layout import ClassRecords
from duotone.attention.cuda.classes.levels import SortedLevels, States, torch_levels
from duotone.attention.cuda.classes.params import largest_scales
from duotone.attention.cuda.classes.small_levels import stored_levels
from duotone.attention.cuda.levels import search
from duotone.attention.cuda.levels.search import find_levels
from duotone.attention.cuda.packing.inputs import (
    INPUTS,
    Dense,
    alignment,
    check_readable,
    dense,
    tile_bytes,
)
from duotone.attention.cuda.shared.filling import fitted
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.shared.slots import Slots, slots_of
from duotone.attention.cuda.spans.layout import LANES
from duotone.attention.refused import check_honoured, reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packing import in_basis
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import NOT_FINITE, is_finite
from duotone.quant.honours import Honours
from duotone.quant.small_floats import SCALE, from_bytes

# Levels come from `levels.search`, or from PyTorch operations.
HONOURS = Honours.of(
    "packing kernels of classes",
    search.HONOURS.honours | {"eta"},
    search.HONOURS.bits,
    packs=True,
    params=search.HONOURS.params,
)
SOURCE = "classes/pack.cu"
WARPS = 4


class Side(ctypes.Structure):
    """`Side` of classes/pack.cu."""

    _fields_ = (
        ("x", Dense),
        *((name, ctypes.c_void_p) for name in ("block", "order", "scale", "zero")),
        ("blocks", ctypes.c_longlong),
    )


class Arguments(ctypes.Structure):
    """`Arguments` of classes/pack.cu."""

    _fields_ = (
        *((name, Side) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "k_zero", "token", "packed_tiles")),
        *((name, ctypes.c_int) for name in ("kv_heads", "tiles")),
    )


@dataclass(frozen=True)
class Prepared:
    """All that packing needs but the codes.

    key, value: K and V of the taken tokens in their basis, of one type. key_parameters: scales and
    zero-points that K's codes stand for. records: their codes, and what else tiles have, are not
    written yet.
    """

    key: States
    value: States
    key_levels: SortedLevels
    value_levels: SortedLevels
    key_parameters: tuple[Tensor, Tensor]
    slots: Slots
    records: ClassRecords


def check(spec: KVSpec, *states: States) -> None:
    """Raise `RefusedError` for specs of classes, or for K and V, that no kernel packs."""
    check_honoured(HONOURS, spec.key, spec.value)
    format_of(spec.key, spec.value, (0, 0))
    check_readable(*states)


def class_pack(key: States, value: States, spec: KVSpec, piece: Piece) -> PackedPair:
    """Quantize the tokens that `piece` takes out of K and V.

    The host waits for the number of records once per table of spans, and to check the levels
    unless that is put off (`quant.checks`); `unchecked`, a second call on the same spans can be
    captured.
    Errors: ValueError for what `check` refuses, for numbers that are not
    finite and for levels beyond fp16.
    """
    if reason := reason_against(check, spec, key, value):
        raise ValueError(f"{reason}. Use PackedPair.pack.")
    work = prepared(key, value, spec, piece)
    pack_codes(work)
    left = (
        PackedTensor(tensor, key.shape[3], key.dtype, levels.blocks, None, None)
        for tensor, levels in ((spec.key, work.key_levels), (spec.value, work.value_levels))
    )
    return PackedPair(*left, work.records)


def prepared(key: States, value: States, spec: KVSpec, piece: Piece) -> Prepared:
    """Levels, the order of channels and room for codes; the arguments are `class_pack`'s."""
    form = fitted(ClassFormat.of(spec.key, spec.value, key.shape[3]), piece.spans)
    taken = [in_basis(piece.take.pick(x), s) for x, s in ((key, spec.key), (value, spec.value))]
    levels = (
        sorted_levels(taken[0], spec.key, piece.spans, form.key.channels),
        sorted_levels(taken[1], spec.value, piece.spans, form.value.channels),
    )
    wide = max((x.dtype for x in taken), key=lambda dtype: dtype.itemsize)
    slots = slots_of(piece.spans, form.tokens)
    params = tuple(stored_levels(*x) for x in zip(levels, (spec.key, spec.value), strict=True))
    per_head = slots.token.shape[1] // form.tokens
    records = _records(form, slots.first, per_head, levels, params)
    return Prepared(*(x.to(wide) for x in taken), *levels, params[0], slots, records)


def sorted_levels(x: States, spec: TensorSpec, spans: BlockTable, coded: int) -> SortedLevels:
    """Levels of the blocks of x, by kernels where they can, else by torch. coded: channels.

    Errors: ValueError for numbers that are not finite and for levels beyond fp16.
    """
    # Tables remember one way to split them: asking for none would lose it, and the next layer wait.
    blocks = spans if spec.group is None else spans.split(spec.group)
    if x.is_cuda and reason_against(search.check, x, spec, blocks) is None:
        levels = find_levels(x, spec, blocks)
        if is_finite(levels.total, NOT_FINITE):
            return levels
    return torch_levels(x, spec, blocks, coded)  # which raises, where a kernel's are not finite


def _records(
    form: ClassFormat,
    first: Tensor,
    per_head: int,
    levels: tuple[SortedLevels, SortedLevels],
    stored: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> ClassRecords:
    """Room for codes, and all parameters that belong to spans.

    levels: of K and of V. stored: their scales and zero-points.
    """
    key, value = levels
    size = (*value.scale.shape[:2], per_head, form.nbytes)
    data = torch.empty(size, dtype=torch.uint8, device=value.scale.device)
    params = dict(zip(("value_scale", "value_zero"), stored[1], strict=True))
    params["value_order"] = value.channels
    if form.key_in_tiles:
        scale = from_bytes(stored[0][0], SCALE) if form.key_small else stored[0][0]
        full = F.pad(scale, (0, form.head_dim - scale.shape[-1]))
        params["key_top"] = largest_scales(full, key.order, key.blocks, value.blocks)
    else:
        params |= dict(zip(("key_scale", "key_zero"), stored[0], strict=True))
        params["key_order"] = key.channels
    return ClassRecords(form, data, first, **params)


def pack_codes(work: Prepared) -> None:
    """Write codes, and what else tiles have, of records whose levels are known.

    Nothing here waits for the device; the launch can be captured.
    """
    form, (heads, per_head) = work.records.format, work.records.data.shape[1:3]
    both = ((work.key, work.key_levels), (work.value, work.value_levels))
    sides = [
        Side(dense(x), work.slots.block_of_tile(levels.blocks).data_ptr(),
             levels.channels.data_ptr(), levels.chosen_scale.data_ptr(),
             levels.chosen_zero.data_ptr(), levels.blocks.blocks)
        for x, levels in both
    ]  # fmt: skip
    given = Arguments(
        *sides, *(x.data_ptr() for x in work.key_parameters),
        work.slots.place.data_ptr(), work.records.data.data_ptr(), heads, per_head * form.tiles,
    )  # fmt: skip
    device = work.key.device
    macros = macros_of(form, work.key.dtype, min(alignment(work.key), alignment(work.value)))
    blocks = 2 * len(work.key) * heads * -(-given.tiles // WARPS)
    launch = Launch(blocks, WARPS * LANES, WARPS * macros["WARP_SHARED_BYTES"])
    if blocks:
        with torch.cuda.device(device):
            kernel(SOURCE, "class_pack", tuple(macros.items()), device)(launch, given)


def macros_of(form: ClassFormat, dtype: torch.dtype, align: int) -> dict[str, int]:
    """Macros of classes/pack.cu."""
    words = max(sum(form.key.words), sum(form.value.words))
    places = COLUMN * max(sum(form.key.columns), sum(form.value.columns))
    return {
        "CHANNELS": form.head_dim,
        **form.widths,
        "INPUT": INPUTS[dtype],
        "ALIGN": align,
        "WARPS": WARPS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
        "WARP_SHARED_BYTES": tile_bytes(form.channels, dtype) + 128 * words + 16 * places,
    }
