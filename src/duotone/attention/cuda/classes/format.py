"""Codes that a record of channels of unequal bits holds, and its size."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.shared.slots import TILE
from duotone.attention.cuda.shared.tiles import MOST_TILES, Tiled
from duotone.attention.cuda.spans.layout import RECORD_BYTES
from duotone.attention.refused import RefusedError, check_honoured
from duotone.quant import TensorSpec
from duotone.quant.classes import class_counts
from duotone.quant.honours import Honours

HONOURS = Honours.of(
    "class records",
    {"bits", "group", "classes", "transform", "param_dtype"},
    (4, 2, 1),
    params=("float16", "float8"),
)
WIDTHS = HONOURS.bits
# Channels that a product takes at once, and those of a half column.
COLUMN, HALF = 16, 8
# Bytes of a tile for the exponents of K's scales and zero-points in 8 bits, filled up.
EXPONENTS_BYTES = 16
# Tiles of a record without parameters: few bits would fill it with more tokens than a picture has.
MAX_TILES = 4
MAX_CHANNELS = 256


@dataclass(frozen=True)
class Classes:
    """The classes of K or of V that have codes, as (bits, channels), the widest first."""

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: TensorSpec, head_dim: int) -> Classes:
        """Classes of a spec; codes of one width are one class."""
        if spec.classes is None:
            return cls(((spec.bits, head_dim),))
        return cls(tuple((bits, n) for bits, n in class_counts(spec, head_dim) if bits and n))

    @property
    def channels(self) -> int:
        """Channels that have codes."""
        return sum(n for _, n in self.sizes)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Columns of 16 channels of each class, the last one filled up."""
        return tuple(-(-n // COLUMN) for _, n in self.sizes)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(bits, channels, places) of each class's columns, a half one by itself.

        Half columns have 8 places, and codes of 1 bit none, whose words they would not fill.
        """
        return tuple(piece for bits, n in self.sizes for piece in _pieces(bits, n))

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Words that each lane has of each piece in a tile."""
        return tuple(bits * places // COLUMN for bits, _, places in self.pieces)

    @cached_property
    def codes_bytes(self) -> int:
        """Bytes of the codes of a tile."""
        return sum(self.words) * 128

    @property
    def places(self) -> int:
        """Slots of all columns."""
        return sum(self.columns) * COLUMN

    @property
    def place_of_rank(self) -> Int[Tensor, " channels"]:
        """Places of the channels that have codes."""
        starts = accumulate(self.columns, initial=0)
        runs = [
            COLUMN * start + torch.arange(n)
            for start, (_, n) in zip(starts, self.sizes, strict=False)
        ]
        return torch.cat(runs)

    @property
    def rank_of_place(self) -> Int[Tensor, " places"]:
        """Ranks of K's channels by slots, -1 where columns are filled up; half columns twice."""
        ranks, start = [], 0
        for _, n, places in self.pieces:
            of_piece = torch.full((places,), -1)
            of_piece[:n] = torch.arange(start, start + n)
            ranks.append(of_piece.repeat(2) if places == HALF else of_piece)
            start += n
        return torch.cat(ranks)

    def number_of_rank(self, head_dim: int) -> UInt8[Tensor, " head_dim"]:
        """The class of every rank, those without codes after all others."""
        sizes = [n for _, n in self.sizes]
        sizes = torch.tensor([*sizes, head_dim - sum(sizes)])
        return torch.arange(len(sizes), dtype=torch.uint8).repeat_interleave(sizes)

    def top_of_rank(self, head_dim: int) -> Float[Tensor, " head_dim"]:
        """The largest code of every rank; 0 for those without codes."""
        bits = torch.tensor([*(bits for bits, _ in self.sizes), 0])
        return 2.0 ** bits[self.number_of_rank(head_dim).long()] - 1

    def width(self, bits: int) -> int:
        """Channels of a width."""
        return dict(self.sizes).get(bits, 0)


@dataclass(frozen=True)
class ClassFormat(Tiled):
    """Sizes that follow from head_dim and the classes of K and V.

    key_in_tiles: K's parameters lie in its tiles, else they belong to spans, as V's do.
    key_small, value_small: scales and zero-points have 8 bits (`quant.small_floats`).
    """

    head_dim: int
    key: Classes
    value: Classes
    key_in_tiles: bool = True
    key_small: bool = False
    value_small: bool = False
    most_tiles: int = MOST_TILES
    tile_tokens, record_bytes = TILE, RECORD_BYTES

    @classmethod
    @cache
    def of(cls, key: TensorSpec, value: TensorSpec, head_dim: int) -> ClassFormat:
        """Format of K and V of these specs."""
        both = (Classes.of(spec, head_dim) for spec in (key, value))
        small = (spec.param_dtype == "float8" for spec in (key, value))
        in_tiles = key.group is not None and value.group is None
        return cls(head_dim, *both, in_tiles, *small)

    @property
    def tiles(self) -> int:
        """Tiles per record."""
        return super().tiles if self.key_in_tiles else min(super().tiles, MAX_TILES)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Bytes of the parts of a tile, in the order of the drawing."""
        codes = (self.key.codes_bytes, self.value.codes_bytes)
        if not self.key_in_tiles:
            return codes
        places, each = self.key.places, 1 if self.key_small else 2
        exponents = (EXPONENTS_BYTES,) * self.key_small
        return (*codes, each * self.channels, each * places, places, *exponents)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The macros of classes/widths.cuh, and where K's parameters are."""
        sides = (("KN", self.key), ("VN", self.value))
        counts = {f"{name}{bits}": side.width(bits) for name, side in sides for bits in WIDTHS}
        flags = {"K_TILES": self.key_in_tiles, "K_SMALL": self.key_small}
        flags["V_SMALL"] = self.value_small
        return counts | {name: int(flag) for name, flag in flags.items()}

    @cached_property
    def tile_bytes(self) -> int:
        """All parts of 64 tokens."""
        return sum(self.parts)


def _pieces(bits: int, channels: int) -> list[tuple[int, int, int]]:
    """`Classes.pieces` of one class."""
    whole, rest = divmod(channels, COLUMN)
    if bits == 1 or not 0 < rest <= HALF:
        return [(bits, channels, -(-channels // COLUMN) * COLUMN)]
    half = (bits, rest, HALF)
    return [(bits, whole * COLUMN, whole * COLUMN), half] if whole else [half]


def format_of(
    key: TensorSpec, value: TensorSpec, head_dims: tuple[int, int], apart: Collection[str] = ()
) -> ClassFormat:
    """Format of class records of K and V. apart: no codes are.

    Errors: `RefusedError` where there is none.
    """
    if key.classes is None and value.classes is None:
        raise RefusedError(f"class records hold classes of channels; got {key} and {value}")
    check_honoured(HONOURS, key, value)
    together = key.group == value.group == TILE
    if not together and (value.group is not None or (key.group or TILE) % TILE):
        raise RefusedError(
            f"class records need groups of a multiple of {TILE} tokens in K, or none, and none in "
            f"V, or groups of {TILE} tokens in both; got {key.group} and {value.group}"
        )
    if head_dims[0] != head_dims[1] or head_dims[0] > MAX_CHANNELS:
        raise RefusedError(
            f"class records need one head_dim of K and V, up to {MAX_CHANNELS}; got {head_dims}"
        )
    return ClassFormat.of(key, value, head_dims[0])
