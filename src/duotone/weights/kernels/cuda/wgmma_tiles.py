"""Tiles of the W8A8 kernel for Hopper's warpgroup products, and which of them a product takes.

What a tile costs is counted: products on tensor cores, bytes out of shared memory and into it. The
rates are fitted to products of 150 to 477 tokens on an H200, with 5 % RMS. The chosen tile takes
1.5 % longer than the fastest measured one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

# Columns of a step: a tile's row in shared memory, 128 bytes.
STEP = 128
GROUP_OUTS = 64
TOKEN_MULTIPLE = 16
SHARED_BYTES = 226 << 10
# Per warpgroup: two times 16 tokens by 64 outs of 16 bits, where sums are transposed to rows of
# tokens.
TURN_BYTES = 2 * 16 * GROUP_OUTS * 2
MAX_STAGES = 8
# Per cycle and multiprocessor: products, bytes of shared memory, bytes that come into it.
_PRODUCTS, _SHARED, _INCOMING = 3160.0, 128.0, 58.5
# Cycles to scale and write a number of a tile; next to it, to scale a gate and activate it (counted
# instructions, not measured).
_WRITE, _ACTIVATE = 0.175, 0.17
_CYCLES_PER_US, _LAUNCH_US = 1980.0, 1.5
# The weights, once: bytes per us, and the overhead in us.
_MEMORY_BYTES_PER_US, _MEMORY_US = 3.32e6, 2.7
# Between phases that alternate and phases that overlap: exponents of a norm.
_STEP_NORM, _MEMORY_NORM = 24.0, 6.0


@dataclass(frozen=True)
class WgmmaTile:
    """A tile of the product, and how a block works on it.

    tokens: 16 to 256, in sixteens. groups: warpgroups that multiply. rows: times 64 outs that each
    has. sub_blocks: 1, all groups share a tile; 2, two groups have a tile each and alternate.
    """

    tokens: int
    groups: int = 2
    rows: int = 1
    sub_blocks: int = 1

    @property
    def outs(self) -> int:
        """Channels of the tile."""
        return GROUP_OUTS * self.rows * self.groups // self.sub_blocks

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's codes."""
        return STEP * (self.outs + self.tokens)

    @property
    def stages(self) -> int:
        """Steps that shared memory has room for."""
        return min(MAX_STAGES, (SHARED_BYTES - self.groups * TURN_BYTES) // self.step_bytes)

    def count(self, tokens: int, outs: int) -> int:
        """Tiles of a product."""
        return math.ceil(tokens / self.tokens) * math.ceil(outs / self.outs)


# Kinds of tiles, and the most tokens that registers leave them.
_KINDS = (
    WgmmaTile(256, 1),
    WgmmaTile(256, 2),
    WgmmaTile(192, 3),
    WgmmaTile(160, 2, 2),
    WgmmaTile(256, 2, 1, sub_blocks=2),
    WgmmaTile(160, 2, 2, sub_blocks=2),
    WgmmaTile(112, 2, 3, sub_blocks=2),
)
# Of each warpgroup where it has gate and up: 64 outs of both.
GATED_ROWS = 2
# More tiles along tokens than must be.
_MORE_TILES = 8


@cache
def best_tile(
    tokens: int, outs: int, ins: int, multiprocessors: int, gated: bool = False
) -> WgmmaTile:
    """The tile with the least predicted time; outs of 64 at least.

    gated: half of the outs, and of a tile's, are a gate's, half up's; 128 at least.
    """
    able = (t for t in _tiles(tokens) if t.outs <= outs and (t.rows == GATED_ROWS or not gated))
    given = (tokens, outs, ins, multiprocessors, gated)
    return min(able, key=lambda tile: predicted_us(tile, *given))


def _tiles(tokens: int) -> Iterator[WgmmaTile]:
    for kind in _KINDS:
        fewest = math.ceil(tokens / kind.tokens)
        for count in range(fewest, fewest + _MORE_TILES):
            each = math.ceil(tokens / count / TOKEN_MULTIPLE) * TOKEN_MULTIPLE
            yield WgmmaTile(each, kind.groups, kind.rows, kind.sub_blocks)


def predicted_us(
    tile: WgmmaTile, tokens: int, outs: int, ins: int, multiprocessors: int, gated: bool = False
) -> float:
    """Time of a product [tokens, ins] x [outs, ins] in tiles of this kind; gated: as `best_tile`.

    Every multiplying group reads its 64 outs and all tokens of a tile from shared memory.
    """
    rounds = math.ceil(tile.count(tokens, outs) / multiprocessors)
    reads = tile.outs // GROUP_OUTS * (GROUP_OUTS + tile.tokens) * STEP
    busy = (
        tile.outs * tile.tokens * STEP / _PRODUCTS,
        (reads + tile.step_bytes) / _SHARED,
        tile.step_bytes / _INCOMING,
    )
    each = (_WRITE + _ACTIVATE) / 2 if gated else _WRITE
    writing = each * tile.outs * tile.tokens * (rounds if tile.sub_blocks == 1 else 1)
    cycles = rounds * ins / STEP * _norm(busy, _STEP_NORM) + writing
    memory_us = outs * ins / _MEMORY_BYTES_PER_US + _MEMORY_US
    return _norm((cycles / _CYCLES_PER_US + _LAUNCH_US, memory_us), _MEMORY_NORM)


def _norm(parts: tuple[float, ...], exponent: float) -> float:
    return sum(part**exponent for part in parts) ** (1 / exponent)
