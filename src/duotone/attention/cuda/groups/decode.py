"""Decode attention on group records: KIVI's and InnerQ's groups, in one launch per segment.

The plain-torch reference is `attention.reference.attend` on the same segment. Along rows (KIVI)
codes become levels, rounded once to fp16; along k (InnerQ) they are exact. q and p are rounded to
fp16, sums are fp32. Along rows a scale may be any fp16 number; along k it must lie below
2^(15 - bits), a range of 16,384 or more (`groups.layout.scales_fit`).

Warps draw records from a counter, here as in all kernels with a ring, so that outputs differ from
call to call by the order of fp32 sums. Where torch is set to be deterministic they take them in
turn (IN_TURN in ring.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from duotone.attention.cuda.groups.format import GroupFormat
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.groups.tail import Tail
from duotone.attention.cuda.groups.tiles import Tiles
from duotone.attention.cuda.shared.geometry import (
    MAX_WARPS,
    RING_BYTES,
    Geometry,
    cut,
    cuts,
    multiprocessors,
    ring_bytes,
    slot_bytes,
    warps_within_rings,
)
from duotone.attention.cuda.shared.work import MAX_GROUP, Call, Task, Work
from duotone.cache.segments import PackedSegment

SOURCE = "groups/decode.cu"
# Blocks per multiprocessor where heads take all places of four. What a warp does around its records
# is as much as two of them, and warps of a block merge their sums: a head whose stream is short
# takes least in a single warp, as long as there are other heads next to it.
MANY_PER_SM = (1, 2, 4, 8, 16)


class Codes(ctypes.Structure):
    """`Codes` of groups/separate.cuh."""

    _fields_ = (("data", ctypes.c_void_p), ("head_bytes", ctypes.c_longlong))


class Arguments(Call):
    """`Arguments` of groups/separate.cuh, where codes are separate."""

    _fields_ = (("key", Codes), ("value", Codes))


def warps_of(form: GroupFormat, group: int, ring_bytes: int = RING_BYTES) -> int:
    """Warps per SM: what the registers of the accumulators and the rings leave.

    0: the kernel has no such shape, since rings and sums do not fit shared memory.
    """
    if group > MAX_GROUP or form.channels > 256:
        return 0
    small = -(-group // 8) * form.channels <= 128
    each_bytes = form.stages * slot_of(form, group)
    return warps_within_rings(MAX_WARPS if small else MAX_WARPS // 2, each_bytes, ring_bytes)


def slot_of(form: GroupFormat, group: int) -> int:
    """Bytes between the records of a ring."""
    return slot_bytes(form, 32 * -(-group // 8) * (form.channels + 8))


@cache
def geometry(
    form: GroupFormat, group: int, heads: int, records: int, sms: int, ring_bytes: int
) -> Geometry:
    """Cut a launch. heads: batch * kv_heads."""
    warps = warps_of(form, group, ring_bytes)
    if heads <= 4 * sms:
        return cut(form, warps, heads, records, sms)
    options = cuts(form, warps, heads, records, sms, per_sm=MANY_PER_SM, min_warps=1)
    return min((at for at in options if at.splits == 1), key=options.__getitem__)


def group_task(
    query: Tensor,
    segment: PackedSegment,
    tau: tuple[float, float] | None = None,
    pages: Tensor | None = None,
) -> Task:
    """The launch over one stream. query: [batch, q_heads, 1, head_dim], contiguous.

    tau: for other segments only. pages: as in `records_task`, as are the errors.
    """
    return records_task(query, segment.records, segment.lengths, pages)


def records_task(
    query: Tensor,
    records: GroupRecords,
    lengths: Tensor,
    pages: Tensor | None = None,
    tail: Tail | None = None,
) -> Task:
    """The launch over records of so many tokens, [batch]. query: as in `group_task`.

    pages: the records are a pool, see `work.Work`. tail: further tokens of the stream, in pages
    of the same pool, that `tail.check` takes; sequences of query may then be apart.
    Errors: ValueError for pages of records whose codes are separate, and for codes that do not fit.
    """
    form = records.format
    arguments = _arguments(records, pages) if form.is_apart else Call
    if tail is not None:
        arguments = partial(tail.arguments, query.stride(0))
    work = Work.of_records(query, form, records.data, lengths, pages=pages)
    sms, rings = multiprocessors(query.device), ring_bytes(query.device)
    at = geometry(form, work.group, work.heads, work.records, sms, rings)
    macros = macros_of(form, work.group) | ({} if tail is None else tail.macros)
    rings_bytes = at.warps * form.stages * macros["SLOT_BYTES"]
    return Task(SOURCE, work, at, macros, arguments, shared_bytes=rings_bytes)


def _arguments(records: GroupRecords, pages: Tensor | None) -> Callable[..., Arguments]:
    """Makes the structure of a launch whose codes are separate."""
    if pages is not None:
        raise ValueError(
            "pages hold whole records; got a stream whose codes layers share, which are separate. "
            "Keep its records in one piece."
        )
    form = records.format
    both = ((form.key, records.key_codes, "key"), (form.value, records.value_codes, "value"))
    codes = {
        name: _codes(records, tiles, name, nbytes)
        for (operand, tiles, name), nbytes in zip(both, form.part_bytes, strict=False)
        if operand.apart
    }

    def arguments(**call: Any) -> Arguments:
        return Arguments(**codes, **call)

    return arguments


def _codes(records: GroupRecords, tiles: Tiles | None, name: str, nbytes: int) -> Codes:
    batch, heads, count = records.data.shape[:3]
    least = (batch, heads, count * records.format.tiles, nbytes)
    shape = None if tiles is None else tuple(tiles.shape)
    fits = tiles is not None and (*shape[:2], shape[3]) == (batch, heads, nbytes)
    fits = fits and shape[2] >= least[2] and tiles.device == records.data.device
    if not fits or not tiles.is_contiguous():
        raise ValueError(
            f"{name}_codes must be contiguous, {least} or more tiles, where the records are; got "
            f"{shape}. Bring them in from the layer that keeps them."
        )
    return Codes(tiles.data_ptr(), shape[2] * nbytes)


def macros_of(form: GroupFormat, group: int) -> dict[str, int]:
    """Macros of groups/decode.cu in addition to those of all kernels."""
    operands = form.key.macros("K") | form.value.macros("V")
    signs = {"K_SIGNS": int(form.key.signs), "V_SIGNS": int(form.value.signs)}
    return {"TILES": form.tiles, "SLOT_BYTES": slot_of(form, group), **operands, **signs}
