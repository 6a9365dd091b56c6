"""Plan of one launch that packs a block of tokens from the shared memory of a cluster.

    | bounds that warps saw, then words of codes | levels | tiles of 32 tokens |

As spans/held.cuh has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from duotone.attention.cuda.packing.inputs import TILE_TOKENS, tile_bytes
from duotone.attention.cuda.spans.layout import RecordFormat

SOURCE = "spans/pack_once.cu"
# Tiles that warps take at the same time: those who share one meet at a barrier of their own, of
# which there are 16, and all threads have one.
MAX_SLOTS = 15
# What the bounds that arrive are counted by, with what aligns it.
BARRIER_BYTES = 16


@dataclass(frozen=True)
class Held:
    """cluster: thread blocks that hold a block of tokens. tiles: of 32 tokens, in each of them."""

    cluster: int
    tiles: int

    @property
    def slots(self) -> int:
        """Tiles at a time: all of them, where there are not too many."""
        return min(MAX_SLOTS, 1 << (self.tiles - 1).bit_length())

    def before_tiles_bytes(self, form: RecordFormat) -> int:
        """Dynamic shared memory before the tiles."""
        widest = max(form.key_bits, form.value_bits, 2)
        return (4 * self.slots * widest + 16) * form.channels

    def shared_bytes(self, form: RecordFormat, dtype: torch.dtype) -> int:
        """Dynamic shared memory of a thread block."""
        return self.before_tiles_bytes(form) + self.tiles * tile_bytes(form.channels, dtype)


def sharers(form: RecordFormat) -> int:
    """Warps that share a tile: two hide more of each other's waits, if its words are even."""
    words = [form.channels * bits // 32 for bits in (form.key_bits, form.value_bits)]
    return 1 if any(n % 2 for n in words) else 2


def held(
    longest: int,
    rows: int,
    form: RecordFormat,
    dtype: torch.dtype,
    sms: int,
    shared_bytes: int,
    max_cluster: int,
    at_once: Callable[[Held], int],
) -> Held | None:
    """The widest cluster of which every row gets one at once; None: too many or too long rows.

    longest: tokens of a row, at most. rows: K's and V's blocks of tokens of all heads. A thread
    block fills a multiprocessor: where rows come in turns, two launches of small ones do better.
    at_once: clusters that the device has room for. They lie within its groups of multiprocessors,
    so that there may be fewer than multiprocessors let hope.
    """
    tiles = -(-longest // TILE_TOKENS)
    for cluster in range(min(max_cluster, tiles, sms // rows), 0, -1):
        at = Held(cluster, -(-tiles // cluster))
        static_bytes = 2 * dtype.itemsize * form.head_dim * cluster + BARRIER_BYTES
        if at.shared_bytes(form, dtype) + static_bytes > shared_bytes:
            return None
        if cluster == 1 or at_once(at) >= rows:
            return at
    return None
