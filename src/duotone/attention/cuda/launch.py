"""What the decode kernels share on the host: arguments, how a launch is cut, its workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from duotone.attention.cuda.layout import LANES
from duotone.attention.cuda.runtime import Launch, kernel

LOG2E = 1.4426950408889634
STAGES = 3
MAX_WARPS = 16
# Shared memory of a block that is left to the rings; the rest holds q, V's scales and barriers.
RING_BYTES = 208 << 10
MAX_GROUP = 16
# Whether a launch begins while the kernel ahead of it in the stream ends.
OVERLAP = True
QUERY_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Of a launch, in us: what a wave costs beside its bytes, what merging costs and each split
# adds, bytes that one SM reads.
WAVE_US, MERGE_US, SPLIT_US, SM_BYTES_PER_US = 4.0, 2.5, 0.15, 33e3


class Format(Protocol):
    """Sizes of the records that a kernel reads."""

    head_dim: int

    @property
    def channels(self) -> int:
        """head_dim, filled up."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens per record."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes per record."""
        ...


class Call(ctypes.Structure):
    """`Call` of common.cuh: what every decode kernel is told."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "records", "tokens", "first_records", "partial", "counters", "out", "lse",
        )),
        *((name, ctypes.c_longlong) for name in ("out_stride", "lse_stride")),
        *((name, ctypes.c_int) for name in (
            "kv_heads", "blocks", "records_per_head", "splits", "units",
        )),
        ("sm_scale", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """How a launch is cut: warps per block, teams per block, splits per block of tokens."""

    warps: int
    teams: int
    splits: int


def warps_within_rings(form: Format, warps: int) -> int:
    """At most `warps`, a power of two, whose rings fit shared memory."""
    while warps * STAGES * form.nbytes > RING_BYTES:
        warps //= 2
    return warps


def cut(
    form: Format,
    warps: int,
    heads: int,
    records: int,
    sms: int,
    max_unit_tokens: int | None = None,
    max_teams: int = 4,
) -> Geometry:
    """The cut with the least predicted time.

    heads: batch * kv_heads * blocks of tokens. records: of each of them, at most.
    max_unit_tokens: what one split may hold at most. max_teams: per block.
    """
    work_us = records * form.nbytes / SM_BYTES_PER_US
    least = -(-records * form.tokens // (max_unit_tokens or records * form.tokens or 1)) or 1
    options = {}
    for teams in (t for t in (1, 2, 4) if t <= max_teams and (t == 1 or warps >= 4 * t)):
        for splits in {least, max(1, min(records, max(least, sms * teams // heads)))}:
            waves = -(-heads * splits // (teams * sms))
            merge_us = MERGE_US + SPLIT_US * splits if splits > 1 else 0.0
            cost = waves * (teams * work_us / splits + WAVE_US) + merge_us
            options[Geometry(warps, teams, splits)] = cost
    return min(options, key=lambda option: options[option])


@dataclass(frozen=True)
class Work:
    """What a launch reads.

    query: [batch, q_heads, 1, head_dim], contiguous. data: records [batch, kv_heads, records,
    format.nbytes]. first: [batch, blocks], where the blocks' records start. tokens: [batch,
    blocks + 1] int64, offsets of the blocks.
    """

    query: Tensor
    data: Tensor
    first: Tensor
    tokens: Tensor
    format: Format

    @property
    def heads(self) -> int:
        """Batch times kv_heads."""
        return self.data.shape[0] * self.data.shape[1]

    @property
    def group(self) -> int:
        """q heads per kv head."""
        return self.query.shape[1] // self.data.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks of tokens per sequence, empty ones included."""
        return self.tokens.shape[1] - 1

    def units(self, at: Geometry) -> int:
        """Shares of the work: a split of a block of a kv head each."""
        return self.heads * self.blocks * at.splits


def run(
    source: str,
    arguments: Callable[..., Call],
    work: Work,
    at: Geometry,
    macros: dict[str, int],
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
    cooperative: bool = False,
) -> None:
    """Launch a decode kernel, the function that is called as its source file.

    arguments: makes the kernel's own structure from the fields of `Call`. macros: what the source
    wants beside what all of them want. out, lse: see `span_decode`.
    """
    workspace = work.units(at) * work.group * (work.format.head_dim + 2)
    partial = work.query.new_empty(workspace, dtype=torch.float32)
    zeros = counters(work.query.device, 2 * work.heads)
    given = arguments(
        partial=partial.data_ptr(),
        counters=zeros.data_ptr(),
        sm_scale=sm_scale * LOG2E,
        **_inputs(work, at),
        **_outputs(out, lse),
    )
    launch = Launch(
        blocks=-(-work.units(at) // at.teams),
        threads=at.warps * LANES,
        shared_bytes=at.warps * STAGES * work.format.nbytes,
        cooperative=cooperative,
        overlap=OVERLAP,
    )
    all_macros = _macros(work, at) | macros | {"ARGUMENTS_BYTES": ctypes.sizeof(given)}
    function = source.removesuffix(".cu")
    kernel(source, function, tuple(all_macros.items()), work.query.device)(launch, given)


def _inputs(work: Work, at: Geometry) -> dict[str, int]:
    return {
        "query": work.query.data_ptr(),
        "records": work.data.data_ptr(),
        "tokens": work.tokens.data_ptr(),
        "first_records": work.first.data_ptr(),
        "kv_heads": work.data.shape[1],
        "blocks": work.blocks,
        "records_per_head": work.data.shape[2],
        "splits": at.splits,
        "units": work.units(at),
    }


def _outputs(out: Tensor, lse: Tensor | None) -> dict[str, int | None]:
    """Between q heads, rows of `out` and numbers of `lse` lie a stride apart."""
    return {
        "out": out.data_ptr(),
        "out_stride": out.stride(1),
        "lse": None if lse is None else lse.data_ptr(),
        "lse_stride": 0 if lse is None else lse.stride(1),
    }


def _macros(work: Work, at: Geometry) -> dict[str, int]:
    return {
        "CHANNELS": work.format.head_dim,
        "G": work.group,
        "WARPS": at.warps,
        "TEAMS": at.teams,
        "STAGES": STAGES,
        "OVERLAP": int(OVERLAP),
        "QUERY": QUERY_TYPES[work.query.dtype],
    }


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# Counters per device: far more than launches that run at the same time can use.
COUNTERS = 1 << 20
_COUNTERS: dict[torch.device, _Counters] = {}


class _Counters:
    """A ring of zeros; every launch takes the next ones and leaves them zero."""

    def __init__(self, device: torch.device) -> None:
        self.zeros, self.next = torch.zeros(COUNTERS, dtype=torch.int32, device=device), 0
        # Launches on other streams take from it, too.
        torch.cuda.current_stream(device).synchronize()

    def take(self, count: int) -> Tensor:
        """`count` zeros that no launch shortly before or after uses."""
        if self.next + count > COUNTERS:
            self.next = 0
        taken = self.zeros[self.next : self.next + count]
        self.next += count
        return taken


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that the launch leaves zero: nothing has to clear them before the next one.

    A graph that is captured keeps those it got. Without a launch before the capture there is no
    ring yet, and the graph clears counters of its own.
    """
    capturing = device not in _COUNTERS and torch.cuda.is_current_stream_capturing()
    if capturing or count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device not in _COUNTERS:
        _COUNTERS[device] = _Counters(device)
    return _COUNTERS[device].take(count)
