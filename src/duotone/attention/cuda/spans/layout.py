"""Records: K and V codes in the order in which the CUDA kernel's matrix units take them.

A record holds a few tiles of 64 tokens, first the codes of all its K, then of all its V:

    | K tile 0 | K tile 1 | ... | V tile 0 | V tile 1 | ... |       about 4 KB, less of short spans

A tile is [vectors][32 lanes][words][4 bytes]: a lane reads its words as vectors of 4 (or 2) words,
and shifted and masked, a word *is* an operand of `mma.m16n8k32`: byte j of register e % (8 / bits)
of word e / (8 / bits). With g = lane / 4 and t = lane % 4, register e of K is

    e = (2 * s + half) * (D / 16) + r      token 16 s + 8 half + g, channel 16 r + 4 t + j

and of V, whose operand is transposed,

    e = (4 * u + 2 * half + row) * (D / 16) + m
        token 32 u + 8 half + 2 t + 16 (j % 2) + j / 2, channel 16 m + 8 row + g

Codes of 3 bits would fill words n = e / 2 of nibbles. Three words hold four of these in two planes:
from bit 7 of each byte down they belong to the codes of words n with n % 4 =

    word 3 (n / 4)        1 1 0 0 1 1 0 0    bits 1 and 0 of a code
    word 3 (n / 4) + 1    3 3 2 2 3 3 2 2    bits 1 and 0
    word 3 (n / 4) + 2    3 2 1 0 3 2 1 0    bit 2

where the upper half of a byte is of odd e.

D is head_dim filled up to a multiple of 32. Every block of tokens that shares scales starts a
record; what is filled up has code 0 and is masked by lengths or multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from duotone.attention.cuda.shared.filling import MIN_BLOCK_TOKENS, fitted, has_records
from duotone.attention.cuda.shared.slots import (
    TILE,
    joined,
    joined_records,
    record_slots,
    slot_of_token,
)
from duotone.attention.cuda.shared.tiles import MOST_TILES, Tiled
from duotone.attention.refused import RefusedError, check_honoured, reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.quant import TensorSpec, pack
from duotone.quant.honours import Honours
from duotone.quant.packing import join_bits, split_bits
from duotone.tools.kept import cached_once, kept

WIDTHS = (1, 2, 3, 4, 8)
HONOURS = Honours.of(
    "span records",
    {"bits", "group", "transform", "param_dtype"},
    WIDTHS,
    params=("float16", "float8"),
)
LANES = 32
RECORD_BYTES = 4096
Codes = UInt8[Tensor, "batch kv_heads tokens channels"]


@dataclass(frozen=True)
class RecordFormat(Tiled):
    """Sizes that follow from head_dim and the widths of K's and V's codes.

    small: scales and zero-points, which stay outside, have 8 bits (`quant.small_floats`).
    """

    head_dim: int
    key_bits: int
    value_bits: int
    small: bool = False
    most_tiles: int = MOST_TILES
    tile_tokens, record_bytes = TILE, RECORD_BYTES

    @cached_property
    def tile_bytes(self) -> int:
        """Codes of 64 tokens."""
        return TILE * self.channels * (self.key_bits + self.value_bits) // 8

    @property
    def least_tiles(self) -> int:
        """Tiles whose ring has room for a warp's sums in the end.

        Of 16 q heads; of 8 where a ring holds K or V alone (`spans.calibrated`).
        """
        half = TILE * self.channels * max(self.key_bits, self.value_bits) // 8
        of_four = 16 * (self.channels + 8)
        tiles = max(-(-4 * of_four // self.tile_bytes), -(-2 * of_four // half))
        return 1 << (-(-tiles // self.stages) - 1).bit_length()


@dataclass(frozen=True)
class Records:
    """Codes of K and V of the same tokens.

    data: [batch, kv_heads, records, format.nbytes]. first: where each block's records start.
    """

    format: RecordFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]
    first: Int[Tensor, "batch blocks"]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, filling included, and of where blocks start."""
        return self.data.nbytes + self.first.nbytes

    def rows(self, index: Int[Tensor, " rows"]) -> Records:
        """Pick sequences."""
        return Records(self.format, self.data[index], self.first[index])

    @property
    def shape(self) -> torch.Size:
        """(batch, kv_heads)."""
        return self.data.shape[:2]

    @property
    def by_head(self) -> dict[str, Tensor]:
        """All but where blocks start."""
        return {"data": self.data}

    @property
    def params_bytes(self) -> int:
        """Scales and zero-points stay outside."""
        return 0

    def canonical(
        self, key: PackedTensor, value: PackedTensor
    ) -> tuple[PackedTensor, PackedTensor]:
        """K and V with codes of their own in canonical order."""
        codes = from_records(self, key.blocks)
        return (
            replace(key, codes=pack(codes[0], key.spec.bits)),
            replace(value, codes=pack(codes[1], value.spec.bits)),
        )

    def left(self, key: PackedTensor, value: PackedTensor) -> tuple[PackedTensor, PackedTensor]:
        """Everything but the codes."""
        return key.without_codes(), value.without_codes()

    def append(self, other: Records, held: BlockTable, more: BlockTable) -> Records | None:
        """Records of more blocks after ours, by copying; None where theirs have another size."""
        if other.format != self.format:
            return None
        join, first = joined_records(held, more, self.format.tokens, self.data.shape[2])
        return Records(self.format, joined(join, self.data, other.data), first)


def span_layout(key: PackedTensor, value: PackedTensor) -> Records | None:
    """The records of K and V whose scales belong to whole spans; None for other formats."""
    given = (key.spec, value.spec, (key.head_dim, value.head_dim))
    one_table = key.blocks.same_as(value.blocks)
    if reason_against(format_of, *given) or not one_table:
        return None
    form = format_of(*given)
    if not has_records(form, key.blocks):
        return None
    return to_records(key.unpacked(), value.unpacked(), key.blocks, fitted(form, key.blocks))


def format_of(
    key: TensorSpec, value: TensorSpec, head_dims: tuple[int, int], apart: Collection[str] = ()
) -> RecordFormat:
    """Format of records of K and V. apart: no codes are.

    Errors: `RefusedError` where there is none.
    """
    check_honoured(HONOURS, key, value)
    for name, spec in (("key", key), ("value", value)):
        if spec.group is not None and spec.group < MIN_BLOCK_TOKENS:
            raise RefusedError(
                f"records need groups of {MIN_BLOCK_TOKENS} tokens or more; {name} is {spec}"
            )
    if head_dims[0] != head_dims[1]:
        raise RefusedError(f"records need one head_dim of K and V; got {head_dims}")
    if key.param_dtype != value.param_dtype:
        raise RefusedError(
            "span records need parameters of one type in K and V; got "
            f"{key.param_dtype} and {value.param_dtype}"
        )
    return RecordFormat(head_dims[0], key.bits, value.bits, key.param_dtype == "float8")


def to_records(key: Codes, value: Codes, blocks: BlockTable, form: RecordFormat) -> Records:
    """Lay out unpacked codes; tokens past a block's end in its last record have code 0."""
    token, first = record_slots(blocks, form.tokens)
    parts = []
    for codes, bits, order in (
        (key, form.key_bits, key_order),
        (value, form.value_bits, value_order),
    ):
        filled = take_tokens(codes, token, form.channels)
        tiles = tile_codes(filled, _on_device(codes.device, order, form.channels, bits), bits, TILE)
        parts.append(tiles.unflatten(2, (-1, form.tiles)).flatten(3))
    return Records(form, torch.cat(parts, -1), first)


def from_records(records: Records, blocks: BlockTable) -> tuple[Codes, Codes]:
    """Exact inverse of `to_records`; tokens past a sequence's end have any code."""
    form = records.format
    token, _ = record_slots(blocks, form.tokens)
    key_bytes = form.nbytes * form.key_bits // (form.key_bits + form.value_bits)
    key, value = records.data.split([key_bytes, form.nbytes - key_bytes], -1)
    place = slot_of_token(token, blocks.tokens)
    unpacked = []
    for part, bits, order in (
        (key, form.key_bits, key_order),
        (value, form.value_bits, value_order),
    ):
        tiles = part.unflatten(-1, (form.tiles, -1)).flatten(2, 3)
        places = _on_device(tiles.device, order, form.channels, bits)
        codes = untile_codes(tiles, places, bits, TILE)[..., : form.head_dim]
        at = place[:, None, :, None].expand(-1, codes.shape[1], -1, form.head_dim)
        unpacked.append(codes.gather(2, at))
    return unpacked[0], unpacked[1]


def take_tokens(codes: Codes, token: Tensor, channels: int) -> Codes:
    """Codes in the order of the slots, with channels filled up."""
    index = token.clamp_min(0)[:, None, :, None].expand(-1, codes.shape[1], -1, codes.shape[3])
    taken = codes.gather(2, index).masked_fill((token < 0)[:, None, :, None], 0)
    return torch.nn.functional.pad(taken, (0, channels - codes.shape[3]))


def tile_codes(
    codes: Codes, order: Int[Tensor, "bytes codes"], bits: int, tile: int
) -> UInt8[Tensor, "batch heads tiles bytes"]:
    """Pack codes, `tile` tokens at a time, in the order of a table of places.

    Where codes straddle bytes, places are those of their single bits.
    """
    if 8 % bits:
        return tile_codes(split_bits(codes, bits), order, 1, tile)
    order = order.to(codes.device)
    tiles = codes.unflatten(2, (-1, tile)).flatten(3)
    places = tiles[..., order.flatten()].unflatten(-1, order.shape)
    shifts = torch.arange(order.shape[-1], device=codes.device, dtype=torch.uint8) * bits
    return (places << shifts).sum(-1, dtype=torch.uint8)


def untile_codes(
    tiles: UInt8[Tensor, "batch heads tiles bytes"], order: Tensor, bits: int, tile: int
) -> Codes:
    """Inverse of `tile_codes`."""
    if 8 % bits:
        return join_bits(untile_codes(tiles, order, 1, tile), bits)
    order = order.to(tiles.device)
    shifts = torch.arange(order.shape[-1], device=tiles.device, dtype=torch.uint8) * bits
    codes = (tiles[..., None] >> shifts) & ((1 << bits) - 1)
    flat = torch.empty_like(codes.flatten(-2))
    flat[..., order.flatten()] = codes.flatten(-2)
    return flat.unflatten(-1, (tile, -1)).flatten(2, 3)


def words_per_vector(words: int) -> int:
    """Words that a lane reads at once, out of those that it reads of a tile."""
    return 4 if words % 4 == 0 else 1 if words % 2 else 2


def coordinates(channels: int, bits: int, unit: int | None) -> tuple[Tensor, ...]:
    """(lane, byte j, register e) of every code, each [bytes of a tile, codes per byte]."""
    words, per_byte = channels * bits // 16, 8 // bits
    unit = unit or words_per_vector(words)
    shape = (words // unit, LANES, unit, 4, per_byte)
    vector, lane, within, j, place = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    register = (vector * unit + within) * per_byte + place
    return tuple(t.reshape(-1, per_byte) for t in (lane, j, register))


@cache
def key_order(channels: int, bits: int, unit: int | None = None) -> Int[Tensor, "bytes codes"]:
    """Element, token * channels + channel, in each slot of a tile of K; of 3 bits, as `_planes`.

    unit: words per vector; None: as the kernel reads a tile that has these codes alone.
    """
    if bits == 3:
        return _planes(key_order(channels, 4))
    lane, j, register = coordinates(channels, bits, unit)
    row, r = register // (channels // 16), register % (channels // 16)
    token = 8 * row + lane // 4
    return token * channels + 16 * r + 4 * (lane % 4) + j


@cache
def value_order(channels: int, bits: int, unit: int | None = None) -> Int[Tensor, "bytes codes"]:
    """Element, token * channels + channel, in each slot of a tile of V; of 3 bits, as `_planes`.

    unit: words per vector; None: as the kernel reads a tile that has these codes alone.
    """
    if bits == 3:
        return _planes(value_order(channels, 4))
    lane, j, register = coordinates(channels, bits, unit)
    m, a = register % (channels // 16), register // (channels // 16)
    token = 32 * (a // 4) + 8 * (a // 2 % 2) + 2 * (lane % 4) + 16 * (j % 2) + j // 2
    return token * channels + 16 * m + 8 * (a % 2) + lane // 4


@cached_once
def _on_device(
    device: torch.device, order: Callable[[int, int], Tensor], channels: int, bits: int
) -> Tensor:
    """A table of places on a device, copied once: a copy waits, and cannot be captured."""
    return kept(lambda: order(channels, bits).to(device), device)


def _planes(nibbles: Int[Tensor, "nibble_bytes 2"]) -> Int[Tensor, "bytes 8"]:
    """Single bit, 3 * element + its place from the top, in each slot of a tile of 3 bits.

    nibbles: elements of a tile of 4 bits, whose vectors are the four words that three hold.
    """
    at = torch.arange(8)
    word = torch.stack([at // 2 % 2, 2 + at // 2 % 2, at % 4])
    bit = torch.stack([at % 2, at % 2, torch.full_like(at, 2)])
    vectors = nibbles.view(-1, LANES, 4, 4, 2)
    element = vectors[:, :, word[:, None], torch.arange(4)[:, None], at // 4]
    of_lanes = (3 * element + 2 - bit[:, None]).transpose(0, 1).flatten(1, 2)
    unit = words_per_vector(of_lanes.shape[1])
    return of_lanes.unflatten(1, (-1, unit)).transpose(0, 1).reshape(-1, 8)
