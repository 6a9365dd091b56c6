"""Records of K and V with a scale for every group of elements, for `group_decode.cu`.

A record holds tiles of 32 tokens, each with all it needs, so that a group that joins a stream is
one more tile:

    | codes of K | codes of V | scales of K | scales of V |       32 tokens

K and V are matrices of rows by k, of which k is summed over: K is tokens by channels, V channels
by tokens. Codes are in the order of the operand A of `mma.m16n8k16`: with g = lane / 4 and
t = lane % 4, code (row, k) of register e = (row tile * chunks + chunk) * 4 + i is

    row = 16 row tile + g + 8 (i % 2),  k = 16 chunk + 2 t + 8 (i / 2) + half

in bits 16 half + bits * (e % (16 / bits)) of word e / (16 / bits), [vectors][32 lanes][words].

Scales and zero-points (fp16), by what they run along:

    along rows  [row group][chunk][t] {scales of k, k + 1, k + 8, k + 9; their zero-points}
    along k     [row tile][group][g]  {scales of rows g, g + 8; their zero-points}
    with signs  [row tile][group][g]  {scales of rows g, g + 8}, then [..][g] {words of g, g + 8}

A word has the group's zero-point, or, where the scale has its sign bit set, the signs of its 32
elements: of k at bit 15 - j (even k) or 31 - j (odd k), j = 8 (k / 16) + 4 (k / 8 % 2) + k / 2 % 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.layout import LANES, STAGES, tile_codes
from duotone.cache import PackedTensor
from duotone.cache.ragged import valid_mask
from duotone.quant import TensorSpec

TILE = 32
RECORD_BYTES = 3072
WIDTHS = (1, 2, 4)


@dataclass(frozen=True)
class Operand:
    """How K or V of a tile are stored. along_k: a scale for a run of what is summed over."""

    bits: int
    along_k: bool
    group: int
    signs: bool

    def groups(self, rows: int, k: int) -> int:
        """Scales of a matrix of rows by k."""
        return rows * -(-k // self.group) if self.along_k else -(-rows // self.group) * k


@dataclass(frozen=True)
class GroupFormat:
    """Sizes that follow from head_dim and how K and V are stored."""

    head_dim: int
    key: Operand
    value: Operand

    @property
    def channels(self) -> int:
        """head_dim, filled up to a multiple of 32."""
        return -(-self.head_dim // 32) * 32

    @property
    def part_bytes(self) -> list[int]:
        """Of a tile: codes of K and of V, scales of K and of V."""
        sizes = ((self.key, TILE, self.channels), (self.value, self.channels, TILE))
        codes = [TILE * self.channels * x.bits // 8 for x, _, _ in sizes]
        return codes + [x.groups(rows, k) * (6 if x.signs else 4) for x, rows, k in sizes]

    @property
    def tile_bytes(self) -> int:
        """Codes and scales of 32 tokens."""
        return sum(self.part_bytes)

    @property
    def tiles(self) -> int:
        """Tiles per record: what fits RECORD_BYTES, one at least."""
        return 1 << max(0, (RECORD_BYTES // self.tile_bytes).bit_length() - 1)

    @property
    def tokens(self) -> int:
        """Tokens per record."""
        return self.tiles * TILE

    @property
    def stages(self) -> int:
        """Records that a warp has room for."""
        return STAGES

    @property
    def nbytes(self) -> int:
        """Bytes per record."""
        return self.tiles * self.tile_bytes


def operand_reason(spec: TensorSpec, which: str) -> str | None:
    """Why K ("key") or V ("value") of a spec cannot be in group records, or None."""
    if spec.bits not in WIDTHS or spec.param_dtype != "float16" or spec.along == "span":
        return f"group records have {WIDTHS} bits and float16 scales along one axis; got {spec}"
    if spec.classes is not None:
        return f"group records hold codes of one width; got {spec}"
    if spec.group is None and spec.along == "tokens":
        return f"group records need groups along tokens; got {spec}"
    if spec.group is not None and (spec.group % 32 or spec.group & (spec.group - 1)):
        return f"group records need groups of 32, 64 or 128; got {spec}"
    if spec.mapping != "asymmetric" and (not _along_k(spec, which) or spec.group != 32):
        return f"signs need groups of 32 along what a product sums over; got {spec}"
    return None


def _along_k(spec: TensorSpec, which: str) -> bool:
    return (spec.along == "channels") == (which == "key")


def operand_of(spec: TensorSpec, head_dim: int, which: str) -> Operand | str:
    """The operand that K ("key") or V ("value") is, or why the kernel has none for it."""
    reason = operand_reason(spec, which)
    if reason is not None:
        return reason
    group = spec.group or head_dim
    whole = spec.along == "tokens" or (head_dim % group == 0 and group % 32 == 0)
    if not whole or group & (group - 1):
        return f"groups along channels must be 32, 64 or 128 and divide {head_dim}; got {spec}"
    return Operand(spec.bits, _along_k(spec, which), group, spec.mapping != "asymmetric")


@cache
def group_order(rows: int, k: int, bits: int, rows_last: bool) -> Int[Tensor, "bytes codes"]:
    """Which element of a tile stands where: row * k + k, or k * rows + row if `rows_last`."""
    chunks, per_half = k // 16, 16 // bits
    words = rows * k * bits // 1024
    unit = 4 if words % 4 == 0 else 1 if words % 2 else 2
    shape = (words // unit, LANES, unit, 4, 8 // bits)
    vector, lane, within, byte, place = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    half, position = byte // 2, byte % 2 * (8 // bits) + place
    e = (vector * unit + within) * per_half + position
    i, chunk, tile = e % 4, e // 4 % chunks, e // 4 // chunks
    row = 16 * tile + lane // 4 + 8 * (i % 2)
    column = 16 * chunk + 2 * (lane % 4) + 8 * (i // 2) + half
    index = column * rows + row if rows_last else row * k + column
    return index.reshape(-1, 8 // bits)


def to_group_records(
    key: PackedTensor, value: PackedTensor, form: GroupFormat
) -> UInt8[Tensor, "batch kv_heads records bytes"]:
    """Records, [batch, kv_heads, records, form.nbytes].

    One run of tokens per sequence: a stream. Tokens past its end have code, scale and zero 0.
    Scales must fit (`scales_fit`).
    """
    tokens = -(-key.tokens // form.tokens) * form.tokens
    parts = [
        _codes(key, form.key, tokens, form.channels, value=False),
        _codes(value, form.value, tokens, form.channels, value=True),
        _params(key, form.key, tokens, form.channels, value=False),
        _params(value, form.value, tokens, form.channels, value=True),
    ]
    return torch.cat(parts, -1).unflatten(2, (-1, form.tiles)).flatten(3)


def scales_fit(x: PackedTensor) -> bool:
    """The kernel's fp16 arithmetic can hold all scales (it waits for the device).

    A scale beyond, which a group that joins later may have, becomes infinite, and outputs NaN.
    """
    scale = _where_tokens_are(x, x.scale)
    return not scale.numel() or float(scale.max()) < 2.0 ** (10 - x.spec.bits)


def _where_tokens_are(x: PackedTensor, parameter: Tensor) -> Tensor:
    """A parameter with 0 where no token is."""
    lengths, rows = x.blocks.lengths, parameter.shape[2]
    real = valid_mask(lengths, rows) if x.per_token else x.blocks.sizes > 0
    return parameter.masked_fill(~real[:, None, :, None], 0)


def _fill(x: Tensor, tokens: int, channels: int) -> Tensor:
    """Zeros behind the tokens and channels there are."""
    return torch.nn.functional.pad(x, (0, channels - x.shape[3], 0, tokens - x.shape[2]))


def _codes(x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool) -> Tensor:
    rows, k = (channels, TILE) if value else (TILE, channels)
    order = group_order(rows, k, form.bits, value)
    return tile_codes(_fill(x.unpacked(), tokens, channels), order, form.bits, TILE)


def _params(x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool) -> Tensor:
    """Bytes of the scales of every tile, [batch, heads, tiles, bytes]."""
    scale = _by_operand(x, x.scale, form, tokens, channels, value)
    if form.signs:
        return _with_signs(x, scale, form, tokens, channels, value)
    zero = _by_operand(x, x.zero_point, form, tokens, channels, value)
    both = torch.stack([scale, zero])
    if form.along_k:  # [2, .., rows, groups] -> [row tile][group][g]{2 scales, 2 zero-points}
        split = both.unflatten(-2, (-1, 2, 8))
        out = split.permute(1, 2, 3, 4, 7, 6, 0, 5)
    else:  # [2, .., row groups, k] -> [row group][chunk][t]{4 scales, 4 zero-points}
        split = both.unflatten(-1, (-1, 2, 4, 2))
        out = split.permute(1, 2, 3, 4, 5, 7, 0, 6, 8)
    return out.flatten(3).contiguous().view(torch.uint8)


def _by_operand(
    x: PackedTensor, parameter: Tensor, form: Operand, tokens: int, channels: int, value: bool
) -> Float[Tensor, "batch heads tiles rows k"]:
    """A parameter of every tile as (rows or row groups) by (k groups or k); 0 where no token is."""
    parameter = _where_tokens_are(x, parameter)
    if x.per_token:
        groups = -(-channels // form.group)
        tiled = _fill(parameter, tokens, groups).unflatten(2, (-1, TILE))
    else:
        first = torch.arange(0, tokens, TILE, device=parameter.device)
        block = (first // form.group).clamp_max(parameter.shape[2] - 1)
        tiled = _fill(parameter, parameter.shape[2], channels)[:, :, block].unsqueeze(-2)
    return tiled.transpose(-1, -2) if value else tiled


def _with_signs(
    x: PackedTensor, scale: Tensor, form: Operand, tokens: int, channels: int, value: bool
) -> Tensor:
    """Scales whose sign bit says "signs", then words of signs or zero-points."""
    signs = _fill(x.signs().byte(), tokens, channels).unflatten(2, (-1, TILE))
    signs = (signs.transpose(-1, -2) if value else signs).unflatten(-1, (-1, 32)).long()
    words = (signs << sign_bits(signs.device)).sum(-1)
    modes = _modes(x, scale, form, tokens, channels, value)
    if x.slot is not None:
        offset = _by_operand(x, x.offset.half(), form, tokens, channels, value)
        plain = offset.contiguous().view(torch.int16).long() & 0xFFFF
        words = torch.where(modes, words, plain)
    flagged = torch.where(modes, -scale, scale)  # -0.0 keeps the flag of an empty group

    def rows_apart(t: Tensor) -> Tensor:
        return t.unflatten(-2, (-1, 2, 8)).permute(0, 1, 2, 3, 6, 5, 4).flatten(3).contiguous()

    wide = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    parts = (rows_apart(flagged).view(torch.uint8), rows_apart(wide).view(torch.uint8))
    return torch.cat(parts, -1)


def _modes(
    x: PackedTensor, scale: Tensor, form: Operand, tokens: int, channels: int, value: bool
) -> Tensor:
    """Which groups are sign and magnitude, by operand."""
    if x.symmetric is None:
        return torch.ones_like(scale, dtype=torch.bool)
    return _by_operand(x, x.modes.half(), form, tokens, channels, value) > 0


def sign_bits(device: torch.device) -> Int[Tensor, 32]:
    """The bit of a sign word that each of its 32 elements has."""
    k = torch.arange(32, device=device)
    j = 8 * (k // 16) + 4 * (k // 8 % 2) + k // 2 % 4
    return torch.where(k % 2 == 0, 15 - j, 31 - j)
