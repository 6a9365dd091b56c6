"""How a decode launch is cut into blocks of warps, teams and splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MAX_WARPS, MIN_WARPS = 16, 4
# Shared memory of a multiprocessor that is left to the rings; the rest holds q, V's scales and
# barriers. SM_SHARED_BYTES: all of it.
RING_BYTES = 208 << 10
SM_SHARED_BYTES = 228 << 10
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
    """How a launch is cut: warps per block, blocks per multiprocessor, splits per block of tokens.

    A block is a unit of work: small ones follow each other without waiting for their neighbours,
    those of the next launch, too.
    """

    warps: int
    per_sm: int
    splits: int


def warps_within_rings(form: Format, warps: int) -> int:
    """At most `warps`, a power of two, whose rings fit shared memory."""
    while warps * form.stages * form.nbytes > RING_BYTES:
        warps //= 2
    return warps


def cut(
    form: Format,
    warps: int,
    heads: int,
    records: int,
    sms: int,
    max_unit_tokens: int | None = None,
    per_sm: tuple[int, ...] = (1, 2, 4),
) -> Geometry:
    """The cut with the least predicted time.

    warps: of a multiprocessor. heads: batch * kv_heads * blocks of tokens. records: of each of
    them, at most. max_unit_tokens: what one split may hold at most. per_sm: blocks that a
    multiprocessor may hold.
    """
    work_us = records * form.nbytes / SM_BYTES_PER_US
    least = -(-records * form.tokens // (max_unit_tokens or records * form.tokens or 1)) or 1
    options = {}
    for blocks in (n for n in per_sm if n == min(per_sm) or warps >= MIN_WARPS * n):
        for splits in {least, max(1, min(records, max(least, sms * blocks // heads)))}:
            waves = -(-heads * splits // (blocks * sms))
            merge_us = MERGE_US + SPLIT_US * splits if splits > 1 else 0.0
            cost = waves * (blocks * work_us / splits + WAVE_US) + merge_us
            options[Geometry(warps // blocks, blocks, splits)] = cost
    return min(options, key=lambda option: options[option])


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
