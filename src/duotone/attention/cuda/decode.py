"""`decode_attention` with CUDA kernels: a launch per segment; what they cannot read is Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby

import torch
from torch import Tensor

from duotone.attention.cuda.dense.decode import dense_reason, dense_task
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.left_out import left_out, records_reason
from duotone.attention.cuda.reasons import (
    NO_RECORDS,
    kernel_of,
    query_reason,
)
from duotone.attention.cuda.rotate.merge import MergeTurned
from duotone.attention.cuda.rotate.queries import DEPTHS, kernel_matrices, turned_query
from duotone.attention.cuda.shared.launch import LOG2E, run
from duotone.attention.cuda.shared.runtime import missing
from duotone.attention.cuda.shared.work import Task
from duotone.attention.merge import merge_partials
from duotone.attention.rotated import SegmentQueries
from duotone.cache.segments import DenseSegment, PackedSegment, Segment
from duotone.quant.rotation import out_of_basis
from duotone.recorded import spoil
from duotone.slow_paths import SlowPaths

# q heads per kv head above which streams are launched ahead of spans.
STREAM_FIRST_ABOVE = 4


def unsupported(query: Tensor, kv: Sequence[Segment], tau: object = None) -> str | None:
    """Why CUDA kernels cannot run this call, or None.

    A call needs one segment in records at least; segments that CUDA kernels cannot read must suit
    Triton.
    """
    reason = missing(query.device) or query_reason(query.dtype)
    if reason is not None:
        return reason
    if not any(in_records(segment) for segment in kv):
        return NO_RECORDS
    for segment in kv:
        if in_records(segment) and segment.tokens:
            reason = records_reason(query, segment, kv, tau)
            if reason is not None:
                return reason
    others = [segment for segment in kv if not _is_ours(query, segment, tau)]
    return _unsupported_by_triton(query, others) if others else None


def in_records(segment: Segment) -> bool:
    """The segment's codes are laid out for the CUDA kernels."""
    return isinstance(segment, PackedSegment) and segment.records is not None


def _is_ours(query: Tensor, segment: Segment, tau: object) -> bool:
    """Records, and dense segments that the kernel can read."""
    if isinstance(segment, DenseSegment):
        calibrated = tau is not None and segment.visual
        return not segment.tokens or (not calibrated and dense_reason(query, segment) is None)
    return segment.records is not None


def _unsupported_by_triton(query: Tensor, others: Sequence[Segment]) -> str | None:
    if find_spec("triton") is None:
        return "a segment needs Triton, which is not installed"
    from duotone.attention.triton.decode import unsupported as reason

    return reason(query, others)


def decode_attention_cuda(
    query: Tensor,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    slow: SlowPaths | None = None,
) -> Tensor:
    """softmax(q K^T * sm_scale) V of one query per sequence: `reference.attend`.

    Arguments, result and graph capture as in `triton.decode.decode_attention_triton`.
    Errors: ValueError with the reason from `unsupported`.
    """
    reason = unsupported(query, kv, tau)
    if reason is not None:
        raise ValueError(f"{reason}. Use impl='auto', 'triton' or 'reference'.")
    return attend_records(query, kv, sm_scale=sm_scale, tau=tau, slow=slow)


def attend_records(
    query: Tensor,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    slow: SlowPaths | None = None,
) -> Tensor:
    """`decode_attention_cuda` of a call for which `unsupported` has no reason.

    slow: hears of segments that Triton reads.
    """
    query = query.contiguous()
    present = [segment for segment in kv if segment.tokens]
    ours = [segment for segment in present if _is_ours(query, segment, tau)]
    with torch.cuda.device(query.device):
        if len(ours) < len(present):
            others = [segment for segment in present if not _is_ours(query, segment, tau)]
            if slow is not None:
                _say(slow, query, others, tau)
            return _attend_with_triton(query, ours, others, sm_scale, tau)
        out = torch.empty_like(query)
        _attend(query, ours, sm_scale, tau, out)
    return out


def _say(
    slow: SlowPaths,
    query: Tensor,
    others: Sequence[Segment],
    tau: tuple[float, float] | None,
) -> None:
    for reason in left_out(query, others, tau):
        slow.say("decode attention of some tokens", "triton", reason)


def _attend(
    query: Tensor,
    kv: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    bases = sorted({_basis(segment) for segment in kv} - {""})
    if not bases:
        run(sorted(_tasks(query, kv, tau), key=_turn), sm_scale, out, lse)
    elif len(bases) == 1 and tau is None and query.shape[3] in DEPTHS:
        _attend_in_basis(query, kv, bases[0], sm_scale, out, lse)
    else:
        attend_by_basis(query, kv, sm_scale, tau, out, lse)


def _basis(segment: Segment) -> str:
    """Transform of a segment's values; "" for none."""
    value = segment.value
    return (value.spec.transform or "") if isinstance(segment, PackedSegment) else ""


def _attend_in_basis(
    query: Tensor,
    kv: Sequence[Segment],
    basis: str,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """One launch merges what is in the basis and what is not, and turns it back."""
    inside = [segment for segment in kv if _basis(segment)]
    outside = [segment for segment in kv if not _basis(segment)]
    tasks = _tasks(query, [*inside, *outside], None)
    back = kernel_matrices(basis, "back", query.shape[3], query.device)
    parts = sum(task.parts for task in tasks[: len(inside)])
    run(tasks, sm_scale, out, lse, MergeTurned(back, parts))


def attend_by_basis(
    query: Tensor,
    kv: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Kernels merge within a basis of values, torch what comes out of each."""
    partials = []
    for transform, segments in groupby(sorted(kv, key=_basis), _basis):
        part = torch.empty_like(query, dtype=torch.float32)
        sums = part.new_empty(part.shape[:2])
        run(sorted(_tasks(query, list(segments), tau), key=_turn), sm_scale, part, sums)
        partials.append((out_of_basis(part, transform or None), sums[..., None] / LOG2E))
    merged, total = merge_partials(partials)
    out.copy_(merged)
    if lse is not None:
        lse.copy_(total.squeeze(-1) * LOG2E)


def _attend_with_triton(
    query: Tensor,
    ours: Sequence[Segment],
    others: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
) -> Tensor:
    from duotone.attention.triton.decode import SegmentLaunch, attend_launches

    spoil()
    launches = [SegmentLaunch(query, segment, sm_scale) for segment in others]
    if ours:
        launches = [RecordsLaunch(query, ours, sm_scale, tau), *launches]
    return attend_launches(query, launches, query.shape[3], tau)


class RecordsLaunch:
    """Segments of the CUDA kernels among Triton's: one partial output per q head."""

    splits = 1
    # Calibrates itself: no other launch has to know its range.
    visual = False

    def __init__(
        self,
        query: Tensor,
        kv: Sequence[Segment],
        sm_scale: float,
        tau: tuple[float, float] | None,
    ) -> None:
        self.call = (query, kv, sm_scale, tau)

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
        _attend(*self.call, out, sums)

    def turn_back(self, partial: Tensor) -> None:
        """Nothing: what was rotated is turned back already."""


def _tasks(query: Tensor, kv: Sequence[Segment], tau: tuple[float, float] | None) -> list[Task]:
    """Planned before the first is launched: the others do not wait for what torch does between."""
    queries = SegmentQueries(query, turned_query)
    return [_task(queries.of(segment), segment, tau) for segment in kv]


def _turn(task: Task) -> tuple[bool, bool]:
    """Tasks that must be resident as a whole come first, then, of many q heads, streams.

    After short blocks of a stream a span's many ones of two warps start as places become free:
    2 % of a step's attention at 6 q heads per kv head, nothing at 4 (dev/log/kernels.md).
    """
    ahead = task.source == group_decode.SOURCE and task.work.group > STREAM_FIRST_ABOVE
    return not task.cooperative, not ahead


def _task(query: Tensor, segment: Segment, tau: tuple[float, float] | None) -> Task:
    """query: as the segment wants it."""
    if isinstance(segment, DenseSegment):
        return dense_task(query, segment)
    return kernel_of(segment.records.format).segment_task(query, segment, tau)
