"""Decode attention on group records: KIVI's and InnerQ's groups, in one launch per segment.

The plain-torch reference is `attention.reference.attend` on the same segment. Along rows (KIVI)
codes become levels, rounded once to fp16; along k (InnerQ) they are exact. q and p are rounded to
fp16, sums are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jaxtyping import Int, UInt8
from torch import Tensor

from duotone.attention.cuda.geometry import (
    MAX_WARPS,
    RING_BYTES,
    Geometry,
    cut,
    multiprocessors,
    ring_bytes,
    warps_within_rings,
)
from duotone.attention.cuda.group_format import GroupFormat, Operand
from duotone.attention.cuda.launch import MAX_GROUP, Task, Work, run

SOURCE = "group_decode.cu"


@dataclass(frozen=True)
class Stream:
    """A packed segment as the kernel takes it.

    data: [batch, kv_heads, records, format.nbytes], or a pool of pages (`launch.Work`). lengths:
    [batch] int64, tokens.
    """

    format: GroupFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]
    lengths: Int[Tensor, " batch"]


def warps_of(form: GroupFormat, group: int, ring_bytes: int = RING_BYTES) -> int:
    """Warps per SM: what the registers of the accumulators and the rings leave."""
    small = -(-group // 8) * form.channels <= 128
    return warps_within_rings(form, MAX_WARPS if small else MAX_WARPS // 2, ring_bytes)


def fits(form: GroupFormat, group: int, ring_bytes: int = RING_BYTES) -> bool:
    """The kernel has this shape: the sums fit the rings."""
    sums_bytes = 32 * -(-group // 8) * (form.channels + 8)
    return (
        sums_bytes <= form.stages * form.nbytes
        and group <= MAX_GROUP
        and form.channels <= 256
        and warps_of(form, group, ring_bytes) >= 1
    )


@cache
def geometry(
    form: GroupFormat, group: int, heads: int, records: int, sms: int, ring_bytes: int
) -> Geometry:
    """How a launch is cut. heads: batch * kv_heads."""
    return cut(form, warps_of(form, group, ring_bytes), heads, records, sms)


def group_decode(
    query: Tensor,
    stream: Stream,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    pages: Int[Tensor, "batch pages_per_sequence"] | None = None,
) -> None:
    """softmax(q K^T * sm_scale) V over one stream; `out` and `lse` as `launch.run` has them."""
    run([group_task(query, stream, pages)], sm_scale, out, lse)


def group_task(query: Tensor, stream: Stream, pages: Tensor | None = None) -> Task:
    """The launch over one stream. query: [batch, q_heads, 1, head_dim], contiguous."""
    form = stream.format
    work = Work.of_records(query, form, stream.data, stream.lengths, pages=pages)
    sms, rings = multiprocessors(query.device), ring_bytes(query.device)
    at = geometry(form, work.group, work.heads, work.records, sms, rings)
    return Task(SOURCE, work, at, macros_of(form))


def macros_of(form: GroupFormat) -> dict[str, int]:
    """What group_decode.cu is compiled with beside what all kernels are."""
    return {"TILES": form.tiles, **_operand("K", form.key), **_operand("V", form.value)}


def _operand(name: str, form: Operand) -> dict[str, int]:
    return {
        f"{name}B": form.bits,
        f"{name}_ALONG_K": int(form.along_k),
        f"{name}_GROUP": form.group,
        f"{name}_SIGNS": int(form.signs),
    }
