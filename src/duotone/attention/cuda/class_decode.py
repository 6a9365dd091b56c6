"""Decode attention on class records: channels of unequal bits, in one launch per segment.

The plain-torch reference is `attention.reference.attend` on the same segment. Where the error of
the kernel comes from: q times K's scales is rounded to 16-bit integers (to 2 or 3 bits less where
codes stand higher in their bytes), under the largest product of a span; p as in `span_decode`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, partial

from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.class_format import COLUMN, WIDTHS, ClassFormat
from duotone.attention.cuda.class_layout import ClassRecords
from duotone.attention.cuda.launch import (
    MAX_GROUP,
    MAX_WARPS,
    STAGES,
    Call,
    Geometry,
    Work,
    cut,
    multiprocessors,
    run,
)
from duotone.attention.cuda.span_decode import MAX_UNIT_TOKENS

SOURCE = "class_decode.cu"
# Shared memory that a block may have, less what aligns the rings.
SHARED_BYTES = (227 << 10) - 128


class Arguments(Call):
    """`Arguments` of class_decode.cu."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("k_top", "v_scale", "v_zero", "v_order")),)


@dataclass(frozen=True)
class ClassSpan:
    """A packed segment as the kernel takes it.

    tokens: offsets of the spans, [batch, spans + 1] int64.
    """

    records: ClassRecords
    tokens: Int[Tensor, "batch edges"]


def warps_of(form: ClassFormat, group: int) -> int:
    """Warps per block: what the registers of the accumulators and the rings leave."""
    accumulators = -(-group // 4) * sum(form.value.columns)
    warps = MAX_WARPS if accumulators <= 8 and form.channels <= 128 else MAX_WARPS // 2
    while warps > 1 and not _teams_that_fit(form, group, warps):
        warps //= 2
    return warps


def _teams_that_fit(form: ClassFormat, group: int, warps: int) -> int:
    """The most teams whose beginnings fit shared memory beside the rings, at most 4; 0: none."""
    heads = 4 * -(-group // 4)
    rows = 4 if group <= 4 else -(-group // 8) * 8
    query = 4 * form.channels * (heads + rows)
    team = query + 4 * form.channels + 2 * COLUMN * sum(form.value.columns) + 8 * heads + 64
    rings = warps * STAGES * (form.nbytes + 8) + 8 * warps * heads
    left = SHARED_BYTES - rings
    # A team of several has at least four warps.
    return max((n for n in (1, 2, 4) if n * team <= left and (n == 1 or warps >= 4 * n)), default=0)


def fits(form: ClassFormat, group: int) -> bool:
    """The kernel has this shape: sums fit the rings, and the rings fit shared memory."""
    sums_bytes = 16 * -(-group // 4) * (form.channels + 8)
    rings = sums_bytes <= STAGES * form.nbytes and group <= MAX_GROUP and form.channels <= 256
    return rings and _teams_that_fit(form, group, warps_of(form, group)) > 0


@cache
def geometry(form: ClassFormat, group: int, heads: int, records: int, sms: int) -> Geometry:
    """How a launch is cut. heads: batch * kv_heads * spans."""
    warps = warps_of(form, group)
    teams = _teams_that_fit(form, group, warps)
    return cut(form, warps, heads, records, sms, MAX_UNIT_TOKENS, teams)


def class_decode(
    query: Tensor, span: ClassSpan, sm_scale: float, out: Tensor, lse: Tensor | None = None
) -> None:
    """softmax(q K^T * sm_scale) V over one segment, into `out`; arguments as `span_decode` has.

    Where V is rotated, so is `out`.
    """
    records = span.records
    work = Work(query, records.data, records.first, span.tokens, records.format)
    heads, sms = work.heads * work.blocks, multiprocessors(query.device)
    at = geometry(records.format, work.group, heads, records.data.shape[2], sms)
    arguments = partial(
        Arguments,
        k_top=records.key_top.data_ptr(),
        v_scale=records.value_scale.data_ptr(),
        v_zero=records.value_zero.data_ptr(),
        v_order=records.value_order.data_ptr(),
    )
    run(SOURCE, arguments, work, at, macros_of(records.format), sm_scale, out, lse)


def macros_of(form: ClassFormat) -> dict[str, int]:
    """What class_decode.cu is compiled with beside what all kernels are."""
    sides = (("KN", form.key), ("VN", form.value))
    widths = {f"{name}{bits}": x.width(bits) for name, x in sides for bits in WIDTHS}
    return {"TILES": form.tiles, **widths}
