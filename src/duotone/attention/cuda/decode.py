"""`decode_attention` with CUDA kernels: a launch per segment; what they cannot read is Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

import torch
from torch import Tensor

from duotone.attention.choice import Read
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.kept_call import keep
from duotone.attention.cuda.rotate.merge import MOST_BASES, MergeTurned
from duotone.attention.cuda.rotate.queries import DEPTHS, kernel_matrices, rotated_query
from duotone.attention.cuda.shared.launch import LOG2E, Launched, run
from duotone.attention.cuda.shared.work import Task
from duotone.attention.merge import merge_partials
from duotone.attention.rotated import SegmentQueries
from duotone.cache.segments import Segment
from duotone.quant.rotation import out_of_basis

# q heads per kv head above which streams are launched before spans.
STREAM_FIRST_ABOVE = 4


def attend_records(
    query: Tensor,
    read: Sequence[Read],
    others: Sequence[Segment] = (),
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
) -> Tensor:
    """softmax(q K^T * sm_scale) V of one query per sequence: `reference.attend`.

    read: segments that the kernels read, each with its family (`choice.choose`). others: segments
    that Triton reads. Result and graph capture as in `triton.decode.decode_attention_triton`.
    """
    query = query.contiguous()
    with torch.cuda.device(query.device):
        if others:
            return _attend_with_triton(query, read, others, sm_scale, tau)
        out = torch.empty_like(query)
        called = _attend(query, read, sm_scale, tau, out)
    if called is not None:
        keep(query, read, *called, sm_scale=sm_scale, tau=tau)
    return out


def _attend(
    query: Tensor,
    read: Sequence[Read],
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> tuple[list[int], Launched] | None:
    """Return places of segments in the order of launches, and these; None: torch merges."""
    bases = sorted({_basis(pair) for pair in read} - {""})
    if not bases:
        tasks = _tasks(query, read, tau)
        order = sorted(range(len(tasks)), key=lambda i: _turn(tasks[i]))
        launched = run([tasks[i] for i in order], sm_scale, out, lse)
        return order, launched
    if len(bases) <= MOST_BASES and tau is None and query.shape[3] in DEPTHS:
        return _attend_in_bases(query, read, bases, sm_scale, out, lse)
    attend_by_basis(query, read, sm_scale, tau, out, lse)
    return None


def _basis(pair: Read) -> str:
    """Transform of a segment's values; "" for none."""
    return pair[1].bases[1] or ""


def _attend_in_bases(
    query: Tensor,
    read: Sequence[Read],
    bases: Sequence[str],
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> tuple[list[int], Launched]:
    """One launch merges what is in each basis and what is in none, and turns it back."""
    inside = [[i for i, pair in enumerate(read) if _basis(pair) == basis] for basis in bases]
    order = [i for one in inside for i in one]
    order += [i for i, pair in enumerate(read) if not _basis(pair)]
    tasks = _tasks(query, [read[i] for i in order], None)
    back = [kernel_matrices(basis, "back", query.shape[3], query.device) for basis in bases]
    counts = iter(task.parts for task in tasks)
    parts = [sum(islice(counts, len(one))) for one in inside]
    return order, run(tasks, sm_scale, out, lse, MergeTurned(back, parts))


def attend_by_basis(
    query: Tensor,
    read: Sequence[Read],
    sm_scale: float,
    tau: tuple[float, float] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Kernels merge within a basis of values, torch what comes out of each."""
    partials = []
    for transform, pairs in groupby(sorted(read, key=_basis), _basis):
        part = torch.empty_like(query, dtype=torch.float32)
        sums = part.new_empty(part.shape[:2])
        run(sorted(_tasks(query, list(pairs), tau), key=_turn), sm_scale, part, sums)
        partials.append((out_of_basis(part, transform or None), sums[..., None] / LOG2E))
    merged, total = merge_partials(partials)
    out.copy_(merged)
    if lse is not None:
        lse.copy_(total.squeeze(-1) * LOG2E)


def _attend_with_triton(
    query: Tensor,
    read: Sequence[Read],
    others: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
) -> Tensor:
    from duotone.attention.triton.decode import SegmentLaunch, attend_launches

    launches = [SegmentLaunch(query, segment, sm_scale) for segment in others]
    if read:
        launches = [RecordsLaunch(query, read, sm_scale, tau), *launches]
    return attend_launches(query, launches, query.shape[3], tau)


class RecordsLaunch:
    """Segments of the CUDA kernels among Triton's: one partial output per q head."""

    splits = 1
    # Calibrates itself: no other launch has to know its range.
    visual = False

    def __init__(
        self,
        query: Tensor,
        read: Sequence[Read],
        sm_scale: float,
        tau: tuple[float, float] | None,
    ) -> None:
        self.call = (query, read, sm_scale, tau)

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
        """Nothing: what was rotated is rotated back already."""


def _tasks(query: Tensor, read: Sequence[Read], tau: tuple[float, float] | None) -> list[Task]:
    """Planned before the first is launched: the others do not wait for what torch does between."""
    queries = SegmentQueries(query, rotated_query)
    return [family.task(queries.of(segment), segment, tau) for family, segment in read]


def _turn(task: Task) -> tuple[bool, bool]:
    """Tasks that must be resident as a whole come first, then, of many q heads, streams.

    After short blocks of a stream a span's many ones of two warps start as places become free:
    2 % of a step's attention at 6 q heads per kv head, nothing at 4 (dev/log/kernels.md).
    """
    ahead = task.source == group_decode.SOURCE and task.work.group > STREAM_FIRST_ABOVE
    return not task.cooperative, not ahead
