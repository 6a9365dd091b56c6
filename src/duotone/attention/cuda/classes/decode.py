"""Decode attention on class records: channels of unequal bits, in one launch per segment.

The plain-torch reference is `attention.reference.attend` on the same segment. Where the error of
the kernel comes from: q times K's scales is rounded to 16-bit integers (to 2 or 3 bits less where
codes stand higher in their bytes), under the largest product of a span; p as in `spans.decode`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

from duotone.attention.cuda.classes.format import COLUMN, ClassFormat
from duotone.attention.cuda.shared.geometry import (
    BESIDE_RINGS_KIB,
    MAX_WARPS,
    MIN_WARPS,
    RING_BYTES,
    Geometry,
    cut,
    in_sub_blocks,
    multiprocessors,
    ring_bytes,
    slot_bytes,
)
from duotone.attention.cuda.shared.work import MAX_GROUP, Call, Task, Work
from duotone.attention.cuda.spans.decode import MAX_UNIT_TOKENS
from duotone.cache.segments import PackedSegment

SOURCE = "classes/decode.cu"
# What K or V has of every span.
PARAMETERS = ("scale", "zero", "order")
# Tiles of 16 channels by 4 q heads that a warp's registers hold sums of.
MAX_SUMS = 40
# Shared memory that CUDA keeps of every block; biases, ones and counters.
KEPT_BYTES, SMALL_BYTES, ALIGNMENT_BYTES = 1024, 32 + 8, 128


class Arguments(Call):
    """`Arguments` of classes/decode.cu."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("k_top", "v_scale", "v_zero", "v_order", "k_scale", "k_zero", "k_order")
    )


def warps_of(form: ClassFormat, group: int, ring_bytes: int = RING_BYTES) -> int:
    """Warps per multiprocessor: what the registers of the accumulators and the rings leave.

    0: the kernel has no such shape, since sums do not fit the registers, or rings shared memory.
    """
    accumulators = -(-group // 4) * sum(form.value.columns)
    if accumulators > MAX_SUMS or group > MAX_GROUP or form.channels > 256:
        return 0
    warps = MAX_WARPS if accumulators <= 8 and form.channels <= 128 else MAX_WARPS // 2
    while warps and not per_sm(form, group, warps, ring_bytes):
        warps //= 2
    return warps


def per_sm(
    form: ClassFormat, group: int, warps: int, ring_bytes: int = RING_BYTES
) -> tuple[int, ...]:
    """Into how many blocks `warps` may be cut: their rings and beginnings fit shared memory.

    ring_bytes: what other kernels leave to the rings; what else a block takes is counted here.
    """
    shared_bytes = ring_bytes + (BESIDE_RINGS_KIB + 1 << 10)
    rings_bytes = warps * form.stages * slot_of(form, group)
    return tuple(
        n
        for n in (1, 2, 4)
        if rings_bytes + n * beside_rings(form, group, warps // n) <= shared_bytes
        and (n == 1 or warps >= MIN_WARPS * n)
    )


def slot_of(form: ClassFormat, group: int) -> int:
    """Bytes between the records of a ring, where a warp's sums find room in the end."""
    return slot_bytes(form, 16 * -(-group // 4) * (form.channels + 8))


def beside_rings(form: ClassFormat, group: int, warps: int) -> int:
    """Bytes of shared memory that a block takes in addition to its rings."""
    heads = 4 * -(-group // 4)
    rows = 4 if group <= 4 else -(-group // 8) * 8
    # q by channel and as fp16, or by channel and in K's places; V's parameters and channels, and a
    # factor of 8 bits; maxima, barriers.
    in_tiles = form.key_in_tiles
    folded = form.channels * min(warps, heads) + form.key.places * heads
    query = 4 * (form.channels * (heads + rows) if in_tiles else folded)
    values = 4 * form.channels + 2 * COLUMN * sum(form.value.columns)
    of_warps = warps * (8 * form.stages + 8 * heads)
    values += 16 * form.value_small
    own = query + values + 8 * heads + SMALL_BYTES + of_warps
    return -(-own // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + KEPT_BYTES


@cache
def geometry(
    form: ClassFormat,
    group: int,
    heads: int,
    records: int,
    sms: int,
    ring_bytes: int,
    kv_heads: int = 1,
) -> Geometry:
    """Cut a launch. heads: batch * kv_heads * spans. kv_heads: of a sequence."""
    warps = warps_of(form, group, ring_bytes)
    blocks = per_sm(form, group, warps, ring_bytes)
    at = cut(form, warps, heads, records, sms, MAX_UNIT_TOKENS, blocks)
    if not form.key_in_tiles:
        return at  # sub-blocks gain nothing and lose .7 us after a kernel (dev/log/kernels.md)
    beside_bytes = beside_rings(form, group, at.warps)
    return in_sub_blocks(at, heads * at.splits, kv_heads, sms, beside_bytes)


def class_task(
    query: Tensor, segment: PackedSegment, tau: tuple[float, float] | None = None
) -> Task:
    """The launch over one segment. query: [batch, q_heads, 1, head_dim], contiguous.

    Where V is rotated, so is the output. tau: for other segments only.
    """
    records = segment.records
    tokens = records.offsets(segment.value.blocks)
    work = Work.of_records(query, records.format, records.data, tokens, records.first)
    heads, sms = work.heads * work.blocks, multiprocessors(query.device)
    rings = ring_bytes(query.device)
    at = geometry(records.format, work.group, heads, work.records, sms, rings, work.kv_heads)

    tensors = {
        "k_top": records.key_top,
        **{f"k_{name}": getattr(records, f"key_{name}") for name in PARAMETERS},
        **{f"v_{name}": getattr(records, f"value_{name}") for name in PARAMETERS},
    }

    def arguments(**call: Any) -> Arguments:
        given = {name: None if x is None else x.data_ptr() for name, x in tensors.items()}
        return Arguments(**given, **call)

    macros = macros_of(records.format, work.group)
    rings_bytes = at.sub_blocks * at.warps * records.format.stages * macros["SLOT_BYTES"]
    return Task(SOURCE, work, at, macros, arguments, shared_bytes=rings_bytes)


def macros_of(form: ClassFormat, group: int) -> dict[str, int]:
    """Macros of classes/decode.cu in addition to those of all kernels."""
    return {"TILES": form.tiles, **form.widths, "SLOT_BYTES": slot_of(form, group)}
