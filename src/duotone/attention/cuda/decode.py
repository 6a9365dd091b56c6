"""`decode_attention` with CUDA kernels: visual spans in records, everything else by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.attention.cuda import class_decode
from duotone.attention.cuda.class_layout import ClassRecords
from duotone.attention.cuda.launch import QUERY_TYPES
from duotone.attention.cuda.runtime import missing
from duotone.attention.cuda.span_decode import Span, fits, is_resident, span_decode
from duotone.attention.triton_decode import (
    SegmentLaunch,
    attend_launches,
    segment_query,
)
from duotone.attention.triton_decode import unsupported as unsupported_by_triton
from duotone.attention.triton_operands import head_dim_of
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.rotation import rotate


def unsupported(query: Tensor, kv: Sequence[Segment], tau: object = None) -> str | None:
    """Why CUDA kernels cannot run this call, or None.

    A call needs one segment in records at least; the other segments must suit Triton.
    """
    reason = missing(query.device)
    if reason is not None:
        return reason
    spans = [segment for segment in kv if in_records(segment)]
    if not spans:
        return "no segment of this call has its codes in records (QuantizedCache(impl='cuda'))"
    for segment in spans:
        reason = _span_reason(query, segment, kv, tau)
        if reason is not None:
            return reason
    others = [segment for segment in kv if not in_records(segment)]
    return unsupported_by_triton(query, others) if others else None


def in_records(segment: Segment) -> bool:
    """The segment's codes are laid out for the CUDA kernels."""
    return isinstance(segment, PackedSegment) and segment.records is not None


def _span_reason(
    query: Tensor, segment: PackedSegment, kv: Sequence[Segment], tau: object
) -> str | None:
    if query.dtype not in QUERY_TYPES:
        return f"query must be one of {list(QUERY_TYPES)}; got {query.dtype}"
    if segment.mask is not None:
        return "the CUDA kernels take no mask within a packed segment"
    form, classes = segment.records.format, isinstance(segment.records, ClassRecords)
    group = query.shape[1] // segment.records.shape[1]
    if not (class_decode.fits if classes else fits)(form, group):
        return f"no CUDA kernel for {form} with {group} q heads per kv head"
    if tau is not None and segment.visual:
        if classes:
            return "score calibration of channels of unequal bits is not in the CUDA kernels"
        if sum(other.visual for other in kv) > 1:
            return "score calibration over several visual segments is not in the CUDA kernels"
        if not is_resident(query, _span(segment)):
            return "score calibration needs all parts of a head on the device at once"
    return None


def decode_attention_cuda(
    query: Tensor,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
) -> Tensor:
    """softmax(q K^T * sm_scale) V of one query per sequence: `reference.attend`.

    Arguments, result and graph capture as in `triton_decode.decode_attention_triton`.
    Errors: ValueError with the reason from `unsupported`.
    """
    reason = unsupported(query, kv, tau)
    if reason is not None:
        raise ValueError(f"{reason}. Use impl='auto', 'triton' or 'reference'.")
    return attend_records(query, kv, sm_scale, tau)


def attend_records(
    query: Tensor, kv: Sequence[Segment], sm_scale: float, tau: tuple[float, float] | None
) -> Tensor:
    """`decode_attention_cuda` of a call for which `unsupported` has no reason."""
    query = query.contiguous()
    present = [segment for segment in kv if segment.tokens]
    with torch.cuda.device(query.device):
        if len(present) == 1 and in_records(present[0]):
            out = torch.empty_like(query)
            _attend_span(query, present[0], sm_scale, tau, out, None)
            return out
        launches = [
            SpanLaunch(query, segment, sm_scale)
            if in_records(segment)
            else SegmentLaunch(query, segment, sm_scale)
            for segment in present
        ]
        return attend_launches(query, launches, head_dim_of(kv[0].value), tau)


class SpanLaunch:
    """A span among other segments: one partial output per q head, whatever its splits."""

    splits = 1
    # Calibrates itself: no other launch has to know its range.
    visual = False

    def __init__(self, query: Tensor, segment: PackedSegment, sm_scale: float) -> None:
        self.query, self.segment, self.sm_scale = query, segment, sm_scale

    def prepare(self) -> None:
        """Nothing: scales are folded in the kernel."""

    def attend(
        self,
        partial: Tensor,
        lse: Tensor,
        first_split: int,
        ranges: Tensor | None,
        tau: tuple[float, float] | None,
    ) -> None:
        """Write partial outputs [batch, q_heads, first_split, value_dim] and their lse (log2)."""
        out, sums = partial[:, :, first_split : first_split + 1], lse[:, :, first_split]
        _attend_span(self.query, self.segment, self.sm_scale, tau, out, sums)

    def turn_back(self, partial: Tensor) -> None:
        """Bring the partial output out of the basis of the values, in place."""
        transform = self.segment.value.spec.transform
        if transform is not None:
            partial.copy_(rotate(partial, transform))


def _span(segment: PackedSegment) -> Span:
    key, value = segment.key, segment.value
    return Span(
        segment.records,
        key.scale,
        key.zero_point,
        value.scale,
        value.zero_point,
        key.blocks.offsets,
    )


def _attend_span(
    query: Tensor,
    segment: PackedSegment,
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    turned, transform = segment_query(query, segment), segment.value.spec.transform
    if lse is not None or (transform is None and turned.dtype == query.dtype):
        _decode(turned, segment, sm_scale, tau, out, lse)
        return
    wide = torch.empty_like(turned, dtype=torch.float32)
    _decode(turned, segment, sm_scale, tau, wide, wide.new_empty(wide.shape[:2]))
    out.copy_(rotate(wide, transform))


def _decode(
    query: Tensor,
    segment: PackedSegment,
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """By the kernel that reads these records, in the bases of K and V."""
    if isinstance(segment.records, ClassRecords):
        span = class_decode.ClassSpan(segment.records, segment.value.blocks.offsets)
        class_decode.class_decode(query, span, sm_scale, out, lse)
        return
    calibration = tau if segment.visual else None
    span_decode(query, _span(segment), sm_scale, calibration, out, lse)
