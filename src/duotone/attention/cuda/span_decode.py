"""Decode attention on records: one launch per packed segment, scales and calibration included.

The plain-torch reference is `attention.reference.attend` on the same segment. Where the error of
the kernel comes from: q is rounded to 16-bit integers per head, p to 16 bits under the running
maximum, both exact afterwards (integer products, KERNELS.md).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from duotone.attention.cuda.layout import LANES, RecordFormat, Records
from duotone.attention.cuda.runtime import Launch, kernel

SOURCE, NAME = "span_decode.cu", "span_decode"
LOG2E = 1.4426950408889634
STAGES = 3
MAX_WARPS = 16
# Shared memory of a block that is left to the rings; the rest holds q, V's scales and barriers.
RING_BYTES = 208 << 10
MAX_GROUP = 16
# Sums of a byte of p times a byte of V stay below 2^31.
MAX_UNIT_TOKENS = 32768
QUERY_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Of a launch, in us: what a wave costs beside its bytes, what merging costs and each split
# adds, bytes that one SM reads.
WAVE_US, MERGE_US, SPLIT_US, SM_BYTES_PER_US = 4.0, 2.5, 0.15, 33e3


class Arguments(ctypes.Structure):
    """`Arguments` of span_decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "records", "k_scale", "k_zero", "v_scale", "v_zero", "tokens",
            "first_records", "ranges", "partial", "counters", "out", "lse",
        )),
        *((name, ctypes.c_longlong) for name in ("out_stride", "lse_stride")),
        *((name, ctypes.c_float) for name in ("sm_scale", "tau1", "tau2")),
        *((name, ctypes.c_int) for name in (
            "kv_heads", "blocks", "records_per_head", "splits", "units",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A packed segment as the kernel takes it.

    scales and zero_points: float16, [batch, kv_heads, blocks, head_dim], contiguous.
    tokens: offsets of the blocks, [batch, blocks + 1] int64.
    """

    records: Records
    key_scale: Tensor
    key_zero: Tensor
    value_scale: Tensor
    value_zero: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Geometry:
    """How a launch is cut: warps per block, teams per block, splits per block of tokens."""

    warps: int
    teams: int
    splits: int


def warps_of(form: RecordFormat, group: int) -> int:
    """Warps per block: what the registers of the accumulators and the rings leave."""
    accumulators = -(-group // 4) * form.channels // 16
    warps = MAX_WARPS if accumulators <= 8 else MAX_WARPS // 2
    while warps * STAGES * form.nbytes > RING_BYTES:
        warps //= 2
    return warps


def fits(form: RecordFormat, group: int) -> bool:
    """The kernel has this shape: integers do not overflow and sums fit the rings."""
    dots = form.key_bits < 8 or form.channels <= 128
    sums_bytes = 16 * -(-group // 4) * (form.channels + 8)
    rings = sums_bytes <= STAGES * form.nbytes and warps_of(form, group) >= 1
    return dots and rings and group <= MAX_GROUP and form.channels <= 256


@cache
def geometry(form: RecordFormat, group: int, heads: int, records: int, sms: int) -> Geometry:
    """The cut with the least predicted time.

    heads: batch * kv_heads * blocks of tokens. records: of each of them, at most.
    """
    warps = warps_of(form, group)
    work_us = records * form.nbytes / SM_BYTES_PER_US
    least = -(-records * form.tokens // MAX_UNIT_TOKENS)
    options = {}
    for teams in (t for t in (1, 2, 4) if t == 1 or warps >= 4 * t):
        for splits in {least, min(records, max(least, sms * teams // heads))}:
            waves = -(-heads * splits // (teams * sms))
            merge_us = MERGE_US + SPLIT_US * splits if splits > 1 else 0.0
            cost = waves * (teams * work_us / splits + WAVE_US) + merge_us
            options[Geometry(warps, teams, splits)] = cost
    return min(options, key=lambda option: options[option])


def span_decode(
    query: Tensor,
    span: Span,
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """softmax(q K^T * sm_scale) V over one span, into `out`.

    query: [batch, q_heads, 1, head_dim], contiguous. tau: calibrates the scores by this span's own
    range. out: a row of head_dim numbers per (batch, q head), strided; like `query`, or float32
    if `lse` is given, which then gets log2 of the sum of exponentials of each row.
    """
    form = span.records.format
    batch, kv_heads, records, _ = span.records.data.shape
    group, blocks = query.shape[1] // kv_heads, span.tokens.shape[1] - 1
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    cut = geometry(form, group, batch * kv_heads * blocks, records, sms)
    parts = blocks * cut.splits
    partial = query.new_empty(
        batch * kv_heads * parts * group * (form.head_dim + 2), dtype=torch.float32
    )
    ranges = query.new_empty(batch * kv_heads * parts * group * 2, dtype=torch.float32)
    units = batch * kv_heads * parts
    arguments = Arguments(
        query=query.data_ptr(),
        records=span.records.data.data_ptr(),
        k_scale=span.key_scale.data_ptr(),
        k_zero=span.key_zero.data_ptr(),
        v_scale=span.value_scale.data_ptr(),
        v_zero=span.value_zero.data_ptr(),
        tokens=span.tokens.data_ptr(),
        first_records=span.records.first.data_ptr(),
        ranges=ranges.data_ptr(),
        partial=partial.data_ptr(),
        counters=counters(query.device, 2 * batch * kv_heads).data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        out_stride=out.stride(1),
        lse_stride=0 if lse is None else lse.stride(1),
        sm_scale=sm_scale * LOG2E,
        tau1=(tau[0] if tau else 0.0) * LOG2E,
        tau2=(tau[1] if tau else 0.0) * LOG2E,
        kv_heads=kv_heads,
        blocks=blocks,
        records_per_head=records,
        splits=cut.splits,
        units=units,
    )
    macros = macros_of(form, group, cut, QUERY_TYPES[query.dtype], tau is not None)
    at = Launch(
        blocks=-(-units // cut.teams),
        threads=cut.warps * LANES,
        shared_bytes=cut.warps * STAGES * form.nbytes,
        cooperative=tau is not None and parts > 1,
    )
    kernel(SOURCE, NAME, macros, query.device)(at, arguments)


def is_resident(span: Span, group: int, device: torch.device) -> bool:
    """All teams of a kv head run at once, as calibration over several parts needs them to."""
    form, blocks = span.records.format, span.tokens.shape[1] - 1
    batch, kv_heads, records, _ = span.records.data.shape
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    cut = geometry(form, group, batch * kv_heads * blocks, records, sms)
    parts = blocks * cut.splits
    return parts == 1 or -(-batch * kv_heads * parts // cut.teams) <= sms


def macros_of(
    form: RecordFormat, group: int, cut: Geometry, query_type: int, calibrate: bool
) -> tuple[tuple[str, int], ...]:
    """What span_decode.cu is compiled with."""
    return (
        ("CHANNELS", form.head_dim),
        ("KB", form.key_bits),
        ("VB", form.value_bits),
        ("G", group),
        ("WARPS", cut.warps),
        ("TEAMS", cut.teams),
        ("STAGES", STAGES),
        ("TILES", form.tiles),
        ("QUERY", query_type),
        ("TAU", int(calibrate)),
        ("ARGUMENTS_BYTES", ctypes.sizeof(Arguments)),
    )


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that every launch leaves zero; one buffer per stream, since launches on it queue."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _COUNTERS or len(_COUNTERS[key]) < count:
        _COUNTERS[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _COUNTERS[key]
