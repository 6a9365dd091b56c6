"""How a decode launch is cut into blocks of warps, teams and splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MAX_WARPS = 16
# Shared memory of a block that is left to the rings; the rest holds q, V's scales and barriers.
RING_BYTES = 208 << 10
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

    @property
    def stages(self) -> int:
        """Records that a warp has room for."""
        ...


@dataclass(frozen=True)
class Geometry:
    """How a launch is cut: warps per block, teams per block, splits per block of tokens."""

    warps: int
    teams: int
    splits: int


def warps_within_rings(form: Format, warps: int) -> int:
    """At most `warps`, a power of two, whose rings fit shared memory."""
    while warps * form.stages * form.nbytes > RING_BYTES:
        warps //= 2
    return warps


def cut(
    form: Format, warps: int, heads: int, records: int, sms: int, max_unit_tokens: int | None = None
) -> Geometry:
    """The cut with the least predicted time.

    heads: batch * kv_heads * blocks of tokens. records: of each of them, at most.
    max_unit_tokens: what one split may hold at most.
    """
    work_us = records * form.nbytes / SM_BYTES_PER_US
    least = -(-records * form.tokens // (max_unit_tokens or records * form.tokens or 1)) or 1
    options = {}
    for teams in (t for t in (1, 2, 4) if t == 1 or warps >= 4 * t):
        for splits in {least, max(1, min(records, max(least, sms * teams // heads)))}:
            waves = -(-heads * splits // (teams * sms))
            merge_us = MERGE_US + SPLIT_US * splits if splits > 1 else 0.0
            cost = waves * (teams * work_us / splits + WAVE_US) + merge_us
            options[Geometry(warps, teams, splits)] = cost
    return min(options, key=lambda option: options[option])


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
