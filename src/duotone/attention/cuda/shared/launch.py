"""Launch the tasks of a call; merge their parts by tickets, in the last task, or after it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from duotone.attention.cuda.shared.counters import counters
from duotone.attention.cuda.shared.geometry import multiprocessors
from duotone.attention.cuda.shared.runtime import Launch, PreparedLaunch, entry, kernel
from duotone.attention.cuda.shared.work import QUERY_TYPES, Call, Fields, Task, Work, inverse_of
from duotone.attention.cuda.spans.layout import LANES
from duotone.tools.devices import stream_handle

LOG2E = 1.4426950408889634
# True: a launch begins while the kernel before it in the stream ends.
OVERLAP = True
# From this number of kv heads per multiprocessor on, the last task or a launch after it merges the
# parts of a call, instead of the block of a head that ends last: a ticket costs a part some 2 us.
HEADS_PER_SM_TO_MERGE = 2
MERGE_SOURCE, MERGE_WARPS = "shared/merge_parts.cu", 4
FP32_BYTES = 4


class MergedBy(Enum):
    """MERGE of common.cuh: the kernel that merges the parts of a call.

    NOBODY: a part is the output. TICKETS: the block of a kv head that ends last. LAUNCH: a launch
    after the tasks. TASK: the last task, whose blocks have one part each.
    """

    NOBODY, TICKETS, LAUNCH, TASK = range(4)


@dataclass(frozen=True)
class Room:
    """Room that a call allocates: numbers in fp32, and zeros to count tickets in.

    numbers: of all parts' sums, then of their weights, then of the tasks' ranges. weights, ranges:
    bytes before the weights and before each task's ranges, 0 for a task without. zeros: 0 where no
    block takes tickets.
    """

    numbers: int
    weights: int
    ranges: tuple[int, ...]
    zeros: int

    @classmethod
    def of(cls, tasks: Sequence[Task], by: MergedBy) -> Room:
        """Measure the room that tasks need."""
        work, parts = tasks[0].work, sum(task.parts for task in tasks)
        rows = work.heads * parts * work.group
        zeros = 2 * work.heads if by is MergedBy.TICKETS else 0
        sizes = (rows * work.format.head_dim, 2 * rows, *(task.ranges for task in tasks))
        weights, *starts, numbers = accumulate(sizes)
        pairs = zip(tasks, starts, strict=True)
        ranges = tuple(FP32_BYTES * start if task.ranges else 0 for task, start in pairs)
        return cls(numbers, FP32_BYTES * weights, ranges, zeros)

    def allocate(self, out: Tensor) -> tuple[Fields, int, tuple[Tensor, ...]]:
        """Allocate on the device of `out`.

        Returns fields of `Call`, the address that bytes are counted from, and the tensors.
        """
        numbers = out.new_empty(self.numbers, dtype=torch.float32)
        start = numbers.data_ptr()
        fields: Fields = {
            "partial": start,
            "weights": start + self.weights,
            "counters": None,
            "out": out.data_ptr(),
        }
        if not self.zeros:
            return fields, start, (numbers,)
        fields["counters"], zeros = counters(out.device, self.zeros)
        return fields, start, (numbers, zeros)


@dataclass(frozen=True)
class Launched:
    """Launches of a call: one for each task, then the one that merges, if there is one."""

    made: list[PreparedLaunch]
    room: Room

    def again(self, inputs: Sequence[Fields], out: Tensor) -> None:
        """Launch on the current device for other tensors of equal sizes, without `lse`.

        inputs: fields of each task that differ from the last time. out: as in `run`.
        """
        common, start, _room = self.room.allocate(out)
        stream = stream_handle(out.device.index)
        # The merging launch, which has no task, takes what is common.
        for launch, own, ranges in zip_longest(self.made, inputs, self.room.ranges):
            arguments = launch.arguments
            for name, value in common.items():
                setattr(arguments, name, value)
            for name, value in (own or {}).items():
                setattr(arguments, name, value)
            if ranges:
                arguments.ranges = start + ranges
            launch(stream)


def run(
    tasks: Sequence[Task],
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    merging: Callable[[Work, Tensor, Fields], PreparedLaunch] | None = None,
) -> Launched:
    """softmax(q K^T * sm_scale) V over the keys of all tasks, into `out`.

    tasks: of the same batch, heads and head_dim. out: a row of head_dim numbers per (batch, q
    head), strided; any type of query. lse: receives log2 of the sum of exponentials of each row.
    merging: makes the last launch, which merges the parts of all tasks in their order; no task may
    be cooperative then.
    """
    work = tasks[0].work
    _check_aligned("query", work.query)
    _check_aligned("out", out)
    by = merged_by(tasks) if merging is None else MergedBy.LAUNCH
    room = Room.of(tasks, by)
    allocated, start, _room = room.allocate(out)
    fields = allocated | {
        "out_stride": out.stride(1),
        "lse": None if lse is None else lse.data_ptr(),
        "lse_stride": 0 if lse is None else lse.stride(1),
        "sm_scale": sm_scale * LOG2E,
        "all_parts": sum(task.parts for task in tasks),
    }
    made, first_part = [], 0
    for number, task in enumerate(tasks):
        overlap = 0 if not OVERLAP else 1 if number == 0 else 2
        leaves = by is MergedBy.TASK and number < len(tasks) - 1
        own = {"ranges": start + room.ranges[number]} if task.ranges else {}
        given = task.arguments(**_inputs(task), **fields, **own, first_part=first_part)
        made.append(_launch(task, given, out, overlap, MergedBy.LAUNCH if leaves else by))
        first_part += task.parts
    if by is MergedBy.LAUNCH:
        last = fields | {"first_part": first_part}
        made.append((merging or _merge_parts)(work, out, last))
    return Launched(made, room)


def _check_aligned(name: str, rows: Tensor) -> None:
    """Raise unless rows are aligned to four numbers, which kernels read and write at once."""
    if not is_aligned(rows):
        raise ValueError(
            f"rows of {name} must be aligned to {4 * rows.element_size()} bytes; got one at "
            f"{rows.data_ptr():#x}, strides {rows.stride()}. Use {name}.clone()."
        )


def is_aligned(rows: Tensor) -> bool:
    """Kernels can read or write four numbers of each row at once."""
    return not (rows.data_ptr() % (4 * rows.element_size()) or rows.stride(1) % 4)


def merged_by(tasks: Sequence[Task]) -> MergedBy:
    """Choose the kernel that merges the parts of a call."""
    work = tasks[0].work
    if sum(task.parts for task in tasks) == 1:
        return MergedBy.NOBODY
    # Calibration over several parts counts them anyway.
    together = any(task.cooperative for task in tasks)
    few = work.heads < HEADS_PER_SM_TO_MERGE * multiprocessors(work.query.device)
    if few or together:
        return MergedBy.TICKETS
    return MergedBy.TASK if tasks[-1].parts == 1 else MergedBy.LAUNCH


def _merge_parts(work: Work, out: Tensor, fields: Fields) -> PreparedLaunch:
    """Launch the merging kernel, with a warp for each q head."""
    blocks = -(-work.heads * work.group // MERGE_WARPS)
    launch = Launch(blocks, MERGE_WARPS * LANES, shared_bytes=0, overlap=OVERLAP)
    given = Call(units=work.heads, **fields)
    return launch_merging(MERGE_SOURCE, launch, given, work, out, {"WARPS": MERGE_WARPS})


def launch_merging(
    source: str, at: Launch, given: Call, work: Work, out: Tensor, macros: dict[str, int]
) -> PreparedLaunch:
    """Make the last launch of a call. macros: those of `source` beyond those of call.cuh."""
    all_macros = {
        "CHANNELS": work.format.head_dim,
        "G": work.group,
        "QUERY": QUERY_TYPES[work.query.dtype],
        "OUT": QUERY_TYPES[out.dtype],
        "OVERLAP": 2 * OVERLAP,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
        **macros,
    }
    function = entry(source)
    return kernel(source, function, tuple(all_macros.items()), out.device)(at, given)


def _launch(task: Task, given: Call, out: Tensor, overlap: int, by: MergedBy) -> PreparedLaunch:
    at, form = task.at, task.work.format
    launch = Launch(
        blocks=task.grid,
        threads=at.sub_blocks * at.warps * LANES,
        shared_bytes=task.shared_bytes or at.sub_blocks * at.warps * form.stages * form.nbytes,
        cooperative=task.cooperative,
        overlap=overlap > 0,
        cluster=task.cluster,
    )
    own = {
        "OVERLAP": overlap,
        "OUT": QUERY_TYPES[out.dtype],
        "MERGE": by.value,
    }
    if torch.are_deterministic_algorithms_enabled():
        own["IN_TURN"] = 1  # ring.cuh
    all_macros = _macros(task) | own | task.macros | {"ARGUMENTS_BYTES": ctypes.sizeof(given)}
    function = entry(task.source)
    return kernel(task.source, function, tuple(all_macros.items()), out.device)(launch, given)


def _inputs(task: Task) -> dict[str, int | None]:
    work = task.work
    return {
        "query": work.query.data_ptr(),
        "packed_tiles": None if work.data is None else work.data.data_ptr(),
        "pages": None if work.pages is None else work.pages.data_ptr(),
        "pages_per_sequence": 0 if work.pages is None else work.pages.shape[1],
        "tokens": work.tokens.data_ptr(),
        "first_packed_tiles": None if work.first is None else work.first.data_ptr(),
        "kv_heads": work.kv_heads,
        "blocks": work.blocks,
        "packed_tiles_per_head": work.records,
        "splits": task.at.splits,
        "splits_inverse": inverse_of(task.at.splits),
        "units": task.units,
    }


def _macros(task: Task) -> dict[str, int]:
    return {
        "CHANNELS": task.work.format.head_dim,
        "G": task.work.group,
        "WARPS": task.at.warps,
        "SUB_BLOCKS": task.at.sub_blocks,
        "PER_SM": task.at.per_sm // task.at.sub_blocks,
        "STAGES": task.work.format.stages,
        "QUERY": QUERY_TYPES[task.work.query.dtype],
        "PAGED": task.work.records_per_page,
    }
