"""Reasons why the CUDA kernels leave segments of a call to other implementations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from duotone.attention.cuda.decode import records_reason
from duotone.attention.cuda.dense.decode import dense_reason
from duotone.attention.cuda.reasons import NO_MASK, OTHER_ORDER, group_reason, span_reason
from duotone.attention.cuda.shared.geometry import ring_bytes
from duotone.cache.segments import DenseSegment, Segment


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
