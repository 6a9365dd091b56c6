"""Reasons why the CUDA kernels leave segments of a call to other implementations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from duotone.attention.cuda.dense.decode import dense_reason
from duotone.attention.cuda.reasons import (
    CALIBRATED_GROUPS,
    CALIBRATED_TWICE,
    NO_MASK,
    OTHER_ORDER,
    format_reason,
    group_reason,
    kernel_of,
    span_reason,
)
from duotone.attention.cuda.shared.geometry import ring_bytes
from duotone.attention.cuda.spans import decode as span_decode
from duotone.cache.segments import DenseSegment, PackedSegment, Segment


def left_out(
    query: Tensor, kv: Sequence[Segment], tau: tuple[float, float] | None = None
) -> list[str]:
    """List a reason for each segment that the CUDA kernels do not read."""
    return [
        reason
        for segment in kv
        if segment.tokens and (reason := _segment_reason(query, segment, kv, tau)) is not None
    ]


def _segment_reason(
    query: Tensor, segment: Segment, kv: Sequence[Segment], tau: tuple[float, float] | None
) -> str | None:
    if isinstance(segment, DenseSegment):
        if tau is not None and segment.visual:
            return "score calibration of 16-bit tokens is not in the CUDA kernels"
        return dense_reason(query, segment)
    if segment.records is not None:
        return records_reason(query, segment, kv, tau)
    if segment.mask is not None:
        return NO_MASK
    group = query.shape[1] // segment.heads[1]
    shape = (query.shape[3], group, ring_bytes(query.device))
    ask = span_reason if segment.visual else group_reason
    return ask(segment.key.spec, segment.value.spec, *shape) or OTHER_ORDER


def records_reason(
    query: Tensor, segment: PackedSegment, kv: Sequence[Segment], tau: object
) -> str | None:
    """Why the kernels do not read a segment that is in records, or None."""
    if segment.mask is not None:
        return NO_MASK
    group = query.shape[1] // segment.records.shape[1]
    reason = format_reason(segment.records.format, group, ring_bytes(query.device))
    if reason is not None:
        return reason
    return _calibration_reason(query, segment, kv) if tau is not None else None


def _calibration_reason(query: Tensor, segment: PackedSegment, kv: Sequence[Segment]) -> str | None:
    if not segment.visual:
        return None
    if not kernel_of(segment.records.format).CALIBRATES:
        return CALIBRATED_GROUPS
    if sum(other.visual for other in kv) > 1:
        return CALIBRATED_TWICE
    if not span_decode.is_resident(query, span_decode.span_of(segment)):
        return "score calibration needs all parts of a head on the device at once"
    return None
