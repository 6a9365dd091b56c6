"""Sizes of records made of tiles, for every such format."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

# Records that a warp has room for.
STAGES = 3
# Tiles of a record, where few bits would fit more.
MOST_TILES = 32


class Tiled:
    """Sizes of records; a format defines the bytes and the tokens of a tile."""

    head_dim: int
    tile_tokens: ClassVar[int]
    # Approximate bytes of a record.
    record_bytes: ClassVar[int]
    # Where short spans would fill up larger records (`filling.fitted`).
    most_tiles: int = MOST_TILES

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        raise NotImplementedError

    @cached_property
    def channels(self) -> int:
        """head_dim, filled up to a multiple of 32."""
        return -(-self.head_dim // 32) * 32

    @cached_property
    def tiles(self) -> int:
        """Tiles per record: as many as fit `record_bytes`, one at least, `most_tiles` at most."""
        fit = min(self.record_bytes // self.tile_bytes, self.most_tiles)
        return 1 << max(0, fit.bit_length() - 1)

    @property
    def least_tiles(self) -> int:
        """Tiles that a record needs, whatever it holds."""
        return 1

    @cached_property
    def tokens(self) -> int:
        """Tokens per record."""
        return self.tiles * self.tile_tokens

    @property
    def stages(self) -> int:
        """Number of records that a warp has room for."""
        return STAGES

    @cached_property
    def nbytes(self) -> int:
        """Bytes per record."""
        return self.tiles * self.tile_bytes
