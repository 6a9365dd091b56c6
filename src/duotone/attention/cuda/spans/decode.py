"""Decode attention on records: one launch per packed segment, scales and calibration included.

The plain-torch reference is `attention.reference.attend` on the same segment. Where the error of
the kernel comes from: q is rounded to 16-bit integers per head, p to 16 bits under the running
maximum, both exact afterwards (integer products). A channel of K whose scale is a
thousand times the others' leaves these fewer of the 16 bits. The error that they get by it is a
tenth of what their own levels have, at 1 to 4 bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from duotone.attention.cuda.shared.geometry import (
    MAX_WARPS,
    RING_BYTES,
    Geometry,
    cut,
    in_sub_blocks,
    max_cluster,
    multiprocessors,
    ring_bytes,
    shared_bytes,
    warps_within_rings,
)
from duotone.attention.cuda.shared.launch import LOG2E
from duotone.attention.cuda.shared.work import MAX_GROUP, Call, Task, Work
from duotone.attention.cuda.spans.calibrated import SOURCE as KEEPING_SOURCE
from duotone.attention.cuda.spans.calibrated import block_bytes, kept_geometry
from duotone.attention.cuda.spans.layout import RecordFormat
from duotone.cache.segments import PackedSegment

SOURCE = "spans/decode.cu"
# Sums of a byte of p times a byte of V stay below 2^31.
MAX_UNIT_TOKENS = 32768
# Records per multiprocessor from which on a launch is long. In a short one, what a warp does before
# its first record and after its last one counts: half as many warps do it half as often. In a long
# one more warps hide more.
LONG_RECORDS = 48
# Two tiles of q heads (5 to 8 of them) take more time for products than for bytes in long launches.
# 168 registers hold what they need of few bits: 12 warps. What a warp does before its first record
# and after its last one takes time, too: blocks of two warps, where kv heads fill the device's
# places this many times; below, they would leave it half empty in the end.
TWO_TILES_WARPS, TWO_TILES_BITS = 12, 2
# Blocks of so many warps become smaller where that saves this share of their rounds, and units fill
# the places that there are then this many times.
EVENED_WARPS, EVENED_SHARE, EVENED_WAVES = 4, 0.05, 2.0
TWO_TILES_PER_SM, TWO_TILES_MIN_WARPS, TWO_TILES_WAVES = (1, 2, 3, 6), 2, 1.5


class Arguments(Call):
    """`Arguments` of spans/decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_scale", "k_zero", "v_scale", "v_zero", "ranges")),
        *((name, ctypes.c_float) for name in ("tau1", "tau2")),
    )


def warps_of(form: RecordFormat, group: int, ring_bytes: int = RING_BYTES) -> int:
    """Warps per SM: what the registers of the accumulators and the rings leave.

    0: the kernel has no such shape, since integers overflow or sums do not fit the rings.
    """
    sums_bytes = 16 * -(-group // 4) * (form.channels + 8)
    fits = sums_bytes <= form.stages * form.nbytes and form.channels <= 256
    if group > MAX_GROUP or not fits or (form.key_bits == 8 and form.channels > 128):
        return 0
    accumulators = -(-group // 4) * form.channels // 16
    most = MAX_WARPS if accumulators <= 8 else MAX_WARPS // 2
    return warps_within_rings(most, form.stages * form.nbytes, ring_bytes)


@cache
def geometry(
    form: RecordFormat,
    group: int,
    heads: int,
    records: int,
    sms: int,
    ring_bytes: int,
    calibrate: bool = False,
    kv_heads: int = 1,
) -> Geometry:
    """Cut a launch.

    heads: batch * kv_heads * blocks of tokens. kv_heads: of a sequence.
    """
    if is_long(heads * records, sms) and not calibrate and _has_12_warps(form, group, ring_bytes):
        return _cut_12_warps(form, heads, records, sms)
    at = cut(form, warps_of(form, group, ring_bytes), heads, records, sms, MAX_UNIT_TOKENS)
    if at.warps == MAX_WARPS and not is_long(heads * records, sms):
        return Geometry(MAX_WARPS // 2, 2 * at.per_sm, at.splits)
    if calibrate:
        return at
    if heads * at.splits < EVENED_WAVES * 2 * at.per_sm * sms:
        return in_sub_blocks(at, heads * at.splits, kv_heads, sms)
    return _evened(at, -(-records // at.splits))


def _evened(at: Geometry, records: int) -> Geometry:
    """Blocks of two warps where those of four would share a unit's records less evenly.

    2 % of a span's time at 26 records and 4 q heads per kv head (dev/log/kernels.md).
    """
    if at.warps != EVENED_WARPS or at.per_sm != MAX_WARPS // EVENED_WARPS:
        return at
    four, two = (-(-records // warps) * warps for warps in (EVENED_WARPS, EVENED_WARPS // 2))
    if four - two < EVENED_SHARE * records:
        return at
    return Geometry(EVENED_WARPS // 2, 2 * at.per_sm, at.splits)


def _cut_12_warps(form: RecordFormat, heads: int, records: int, sms: int) -> Geometry:
    per_sm, most = TWO_TILES_PER_SM, max(TWO_TILES_PER_SM)
    if heads >= TWO_TILES_WAVES * most * sms:
        splits = -(-records * form.tokens // MAX_UNIT_TOKENS)
        return Geometry(TWO_TILES_WARPS // most, most, splits)
    warps, least = TWO_TILES_WARPS, TWO_TILES_MIN_WARPS
    return cut(form, warps, heads, records, sms, MAX_UNIT_TOKENS, per_sm, min_warps=least)


def _has_12_warps(form: RecordFormat, group: int, ring_bytes: int) -> bool:
    """Two tiles of q heads do with 168 registers, and their rings find room."""
    is_small = form.channels <= 128 and max(form.key_bits, form.value_bits) <= TWO_TILES_BITS
    rings_bytes = TWO_TILES_WARPS * form.stages * form.nbytes
    return 4 < group <= 8 and is_small and rings_bytes <= ring_bytes


def is_long(records: int, sms: int) -> bool:
    """True if the records of all heads keep the multiprocessors for long."""
    return records >= LONG_RECORDS * sms


def records_in_flight(form: RecordFormat) -> int:
    """Records that a warp has loads in flight for.

    1 bit takes more time for instructions than for bytes: a second one gains nothing, and makes the
    first one come later. With 2 bits and more it is bytes that count.
    """
    return 1 if form.key_bits == form.value_bits == 1 else 2


def span_task(
    query: Tensor,
    segment: PackedSegment,
    tau: tuple[float, float] | None,
    pages: Tensor | None = None,
) -> Task:
    """The launch over one span.

    query: [batch, q_heads, 1, head_dim], contiguous. segment: its scales and zero-points are
    float16, [batch, kv_heads, blocks, head_dim], or rows of 8 bits, contiguous. tau: calibrates the
    scores of a visual segment by their own range. pages: the records are a pool, see `work.Work`;
    scales are stored as ever.
    """
    key, value, form = segment.key, segment.value, segment.records.format
    tau = tau if segment.visual else None
    work = _work(query, segment, pages)
    kept = None if tau is None else _kept_geometry(work)
    at = kept or _geometry(work, calibrate=tau is not None)
    parts = work.blocks * at.splits
    ranges = 0 if tau is None else 2 * parts * query.shape[0] * query.shape[1]
    tau1, tau2 = tau or (0.0, 0.0)

    def arguments(**call: Any) -> Arguments:
        return Arguments(
            k_scale=key.scale.data_ptr(),
            k_zero=key.zero_point.data_ptr(),
            v_scale=value.scale.data_ptr(),
            v_zero=value.zero_point.data_ptr(),
            tau1=tau1 * LOG2E,
            tau2=tau2 * LOG2E,
            **call,
        )

    macros = macros_of(form, tau is not None)
    together = tau is not None and parts > 1
    if tau is None:
        macros["IN_FLIGHT"] = records_in_flight(form)
    if kept is None:
        return Task(SOURCE, work, at, macros, arguments, cooperative=together, ranges=ranges)
    rings_and_scores = block_bytes(form, work.group, at, work.records)
    task = Task(KEEPING_SOURCE, work, at, macros, arguments, False, rings_and_scores, ranges=ranges)
    if together and parts <= max_cluster(query.device):
        return replace(task, cluster=parts, macros=macros | {"CLUSTER": parts})
    return replace(task, cooperative=together)


def is_resident(query: Tensor, segment: PackedSegment) -> bool:
    """All parts of a kv head run at once, as calibration over several of them needs."""
    work = _work(query, segment, None)
    if _kept_geometry(work) is not None:
        return True
    at, form = _geometry(work, calibrate=True), work.format
    parts = work.blocks * at.splits
    # Next to its rings a block takes q as integers, V's scales, barriers, what CUDA keeps.
    beside_bytes = 4 * form.channels * (4 * -(-work.group // 4) + 2) + 3072
    each_bytes = at.warps * form.stages * form.nbytes + beside_bytes
    per_sm = min(at.per_sm, (shared_bytes(query.device) + 1024) // each_bytes)
    return parts == 1 or work.heads * parts <= per_sm * multiprocessors(query.device)


def _kept_geometry(work: Work) -> Geometry | None:
    device = work.query.device
    return kept_geometry(
        work.format,
        work.group,
        warps_of(work.format, work.group, ring_bytes(device)),
        work.heads,
        work.blocks,
        work.records,
        multiprocessors(device),
        shared_bytes(device),
        MAX_UNIT_TOKENS,
        max_cluster(device),
    )


def _work(query: Tensor, segment: PackedSegment, pages: Tensor | None) -> Work:
    records, tokens = segment.records, segment.key.blocks.offsets
    return Work.of_records(query, records.format, records.data, tokens, records.first, pages)


def _geometry(work: Work, calibrate: bool) -> Geometry:
    device, heads = work.query.device, work.heads * work.blocks
    sms, rings = multiprocessors(device), ring_bytes(device)
    return geometry(
        work.format, work.group, heads, work.records, sms, rings, calibrate, work.kv_heads
    )


def macros_of(form: RecordFormat, calibrate: bool) -> dict[str, int]:
    """Macros of spans/decode.cu in addition to those of all kernels."""
    widths = {"KB": form.key_bits, "VB": form.value_bits}
    flags = {"SMALL_PARAMETERS": int(form.small), "TAU": int(calibrate)}
    return {**widths, "TILES": form.tiles, **flags}
