"""Geometry of decode launches: splits, and blocks of warps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from duotone.tools.devices import facts

MAX_WARPS, MIN_WARPS = 16, 4
# Splits in addition to the fewest and the number that fills the device once: they even out waves.
MORE_SPLITS = 4
# Shared memory of a block in KiB, by compute capability (others: at least 99), and its part for q,
# V's scales and barriers; the rest is left to the rings.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED_KIB = 99
BESIDE_RINGS_KIB = 19
# Blocks of a cluster that every device with clusters supports.
MAX_CLUSTER, CLUSTER_CAPABILITY = 8, (9, 0)
SLOT_ALIGNMENT_BYTES = 128
RING_BYTES = (SHARED_KIB[9, 0] - BESIDE_RINGS_KIB) << 10
# Costs of a launch in us: a wave in addition to its bytes, merging, each split; bytes that one SM
# reads per us.
WAVE_US, MERGE_US, SPLIT_US, SM_BYTES_PER_US = 4.0, 2.5, 0.15, 33e3
# Units of a block where all of them run at once; schedulers that share their warps.
SUB_BLOCKS, SCHEDULERS = (2, 4), 4
# Shared memory that the variables of a block may take.
VARIABLES_BYTES = 48 << 10


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
        """Number of records that a warp has room for."""
        ...


@dataclass(frozen=True)
class Geometry:
    """Cut of a launch: warps per unit, units per multiprocessor, splits per block of tokens.

    With one sub-block a unit of work is a block of its own. Small blocks follow each other without
    waiting for their neighbours, and so do blocks of the next launch. Otherwise a unit is one of
    the `sub_blocks` of a block, of as many kv heads, which end together.
    """

    warps: int
    per_sm: int
    splits: int
    sub_blocks: int = 1


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have: all of a multiprocessor but 1 KiB."""
    return SHARED_KIB.get(facts(device).capability, LEAST_SHARED_KIB) << 10


def ring_bytes(device: torch.device) -> int:
    """Shared memory of a block that is left to the rings."""
    return shared_bytes(device) - (BESIDE_RINGS_KIB << 10)


def slot_bytes(form: Format, sums_bytes: int) -> int:
    """Bytes between the records of a ring, where a warp's sums find room in the end."""
    each = -(-sums_bytes // form.stages // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    return max(form.nbytes, each)


def warps_within_rings(warps: int, each_bytes: int, ring_bytes: int) -> int:
    """Number of warps, a power of two up to `warps`, whose rings fit. each_bytes: of a warp."""
    while warps * each_bytes > ring_bytes:
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
    min_warps: int = MIN_WARPS,
) -> Geometry:
    """Choose the cut with the least predicted time.

    warps: of a multiprocessor. heads: batch * kv_heads * blocks of tokens. records: of each of
    them, at most. max_unit_tokens: tokens that one split may hold at most. per_sm: blocks that a
    multiprocessor may hold. min_warps: of a block, where there are several.
    """
    options = cuts(form, warps, heads, records, sms, max_unit_tokens, per_sm, min_warps)
    return min(options, key=lambda option: options[option])


def cuts(
    form: Format,
    warps: int,
    heads: int,
    records: int,
    sms: int,
    max_unit_tokens: int | None = None,
    per_sm: tuple[int, ...] = (1, 2, 4),
    min_warps: int = MIN_WARPS,
) -> dict[Geometry, float]:
    """Predict the time, in us, of all sensible cuts; arguments as in `cut`.

    min_warps: of a block, where a multiprocessor holds several.
    """
    work_us = records * form.nbytes / SM_BYTES_PER_US
    least = -(-records * form.tokens // (max_unit_tokens or records * form.tokens or 1)) or 1
    options = {}
    for blocks in (n for n in per_sm if n == min(per_sm) or warps >= min_warps * n):
        fill = max(1, min(records, max(least, sms * blocks // heads)))
        for splits in {least, fill, *range(least, min(least + MORE_SPLITS, records))}:
            waves = -(-heads * splits // (blocks * sms))
            merge_us = MERGE_US + SPLIT_US * splits if splits > 1 else 0.0
            cost = waves * (blocks * work_us / splits + WAVE_US) + merge_us
            options[Geometry(warps // blocks, blocks, splits)] = cost
    return options


def in_sub_blocks(
    at: Geometry, units: int, kv_heads: int, sms: int, beside_bytes: int = 0
) -> Geometry:
    """Make sub-blocks of one block instead of single blocks, where all units run at once.

    beside_bytes: of a sub-block's variables, where those of all might not fit a block.
    """
    fits = at.per_sm in SUB_BLOCKS and kv_heads % at.per_sm == 0 and at.warps % SCHEDULERS == 0
    fits = fits and at.per_sm * beside_bytes <= VARIABLES_BYTES
    return replace(at, sub_blocks=at.per_sm) if fits and units <= at.per_sm * sms else at


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return facts(device).multiprocessors


def max_cluster(device: torch.device) -> int:
    """Most blocks of a cluster of a device; 1: it has no clusters."""
    return MAX_CLUSTER if facts(device).capability >= CLUSTER_CAPABILITY else 1
