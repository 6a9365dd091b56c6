"""Records of K and V with a scale for every group of elements, for `groups/decode.cu`.

A record holds tiles of 32 tokens, each with all it needs, so that a group that joins a stream is
one more tile:

    | codes of K | codes of V | scales of K | scales of V |       32 tokens

Codes that layers share are not there (`Operand.apart`): they are in a buffer of their own, tile by
tile in the same order, so that each layer's records have its own scales alone.

K and V are matrices of rows by k, of which k is summed over: K is tokens by channels, V channels
by tokens. Codes are in the order of the operand A of `mma.m16n8k16`: with g = lane / 4 and
t = lane % 4, a lane's codes of a row tile and 32 k, its run = row tile * (size of k / 32) + r, are

    row = 16 row tile + 8 i + g,  k = 32 r + 8 q + 2 t + side       i < 2, q < 4, side < 2

and the code is number 8 run + 4 i + q of its lane and side where codes have 2 or 4 bits, and bit
8 i + 2 q + run % 2 of its half of word run / 2 where they have 1. Codes of side 0 fill the lower 16
bits of words, lowest first; words are [vectors][32 lanes][words]. So q alone says how high in its
byte a code stands: products take codes as they stand, and what they meet is divided by that.

Scales and zero-points (fp16), by what they run along; n = row tile * groups of k + group:

    along rows  [row group][chunk of 16 k][t] {steps of k, k + 1, k + 8, k + 9; their zero-points}
    along k     [n / 2]  [g] {scales of n, of n + 1; zero-points of n, of n + 1}
    with signs  [n / 2]  [g] {scales of n, of n + 1; words 0 of n, of n + 1}
                         [g] {words 1 of n, of n + 1}

where "of n" is a word: rows g (lower half) and g + 8 of group n. A step is scale * 2^(6 + bits),
but scale * 2^(8 + bits) for k and k + 1 of 1-bit and 2-bit codes (even q, taken 2 bits lower).
Where one of a tile's scales is `MAX_SCALE` or more, which such a step may not hold, the tile is
wide: all its steps are -scale, -0 included, so that the sign of any of them says which they are.

With signs, an element is a number u of bits + 1 bits and stands for scale * u / 2 + start. A scale
below 0 (-0 included) says sign and magnitude: it is -2 times the scale, u = 2^bits - signed code
and start = -2^(bits - 1) * scale. Otherwise u = 2 * code, start is the zero-point. The codes are
u / 2, their words rotated left by 1 bit; the lowest bit of u, of t, is at bit

    16 i + 8 side + place + t % 2  of word t / 2

with place = 2 q, or 4 (q % 2) + 2 (q / 2) where codes have 4 bits:

    31       24 23       16 15        8 7         0
    |  side 1  |  side 0   |  side 1   |  side 0  |     a byte: q3 q3 q2 q2 q1 q1 q0 q0, odd, even t
    |      row g + 8       |        row g         |

Where a row's scale says zero-point, its half of word 0 is that, and of word 1 is 0.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.groups.format import APART_TILES, TILE, GroupFormat, Operand
from duotone.attention.cuda.spans.layout import LANES, tile_codes
from duotone.cache import PackedTensor
from duotone.cache.ragged import valid_mask
from duotone.tools.kept import cached_once, kept

# Steps are fp16: where a scale along rows is as large or larger, its tile is wide.
MAX_SCALE = 2.0**6


@cache
def group_order(rows: int, k: int, bits: int, rows_last: bool) -> Int[Tensor, "bytes codes"]:
    """Element in each slot of a tile: row * k + k, or k * rows + row if `rows_last`."""
    runs, per_half = k // 32, 16 // bits
    words = rows * k * bits // 1024
    unit = 4 if words % 4 == 0 else 1 if words % 2 else 2
    shape = (words // unit, LANES, unit, 4, 8 // bits)
    vector, lane, within, byte, inner = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    half, position = byte // 2, byte % 2 * (8 // bits) + inner
    place = (vector * unit + within) * per_half + position
    run, i, q = place // 8, place // 4 % 2, place % 4
    if bits == 1:  # two runs of a word alternate
        run, i, q = place // 16 * 2 + place % 2, place // 8 % 2, place // 2 % 4
    row = 16 * (run // runs) + 8 * i + lane // 4
    column = 32 * (run % runs) + 8 * q + 2 * (lane % 4) + half
    index = column * rows + row if rows_last else row * k + column
    return index.reshape(-1, 8 // bits)


@cached_once
def group_order_on(
    device: torch.device, rows: int, k: int, bits: int, rows_last: bool
) -> Int[Tensor, "bytes codes"]:
    """`group_order` on the device that needs it: a captured graph cannot fetch it."""
    return kept(lambda: group_order(rows, k, bits, rows_last).to(device), device)


def to_group_records(
    key: PackedTensor, value: PackedTensor, form: GroupFormat
) -> UInt8[Tensor, "batch kv_heads records bytes"]:
    """Records, [batch, kv_heads, records, form.own_nbytes].

    One run of tokens per sequence: a stream. Tokens past its end have code, scale and zero 0.
    Scales must fit (`scales_fit`). Separate codes are `apart_codes`.
    """
    tokens = -(-key.tokens // form.tokens) * form.tokens
    operands = ((key, form.key, False), (value, form.value, True))
    parts = [_codes(x, at, tokens, form.channels, v) for x, at, v in operands if not at.apart]
    parts += [_params(x, at, tokens, form.channels, v) for x, at, v in operands]
    return torch.cat(parts, -1).unflatten(2, (-1, form.tiles)).flatten(3)


def apart_codes(
    x: PackedTensor, form: Operand, channels: int, value: bool
) -> UInt8[Tensor, "batch kv_heads tiles bytes"] | None:
    """Codes of K or V for a buffer of their own; None where they are in records or not in x."""
    if not form.apart or x.codes is None:
        return None
    step = APART_TILES * TILE
    return _codes(x, form, -(-x.tokens // step) * step, channels, value)


def scales_fit(x: PackedTensor, form: Operand) -> bool:
    """The kernel's fp16 arithmetic can hold all scales (it waits for the device).

    Along rows that is every finite scale; along k those below 2^(15 - bits), of groups that have a
    range of 16,384 and more. A scale beyond, which a group that joins later may have, becomes
    infinite, and outputs NaN.
    """
    limit = 2.0 ** (15 - form.bits) if form.along_k else torch.inf
    scale = _where_tokens_are(x, x.scale)
    return not scale.numel() or float(scale.max()) < limit


def _where_tokens_are(x: PackedTensor, parameter: Tensor) -> Tensor:
    """A parameter with 0 where no token is."""
    lengths, rows = x.blocks.lengths, parameter.shape[2]
    real = valid_mask(lengths, rows) if x.per_token else x.blocks.sizes > 0
    return parameter.masked_fill(~real[:, None, :, None], 0)


def _fill(x: Tensor, tokens: int, channels: int) -> Tensor:
    """Zeros after the given tokens and channels."""
    return torch.nn.functional.pad(x, (0, channels - x.shape[3], 0, tokens - x.shape[2]))


def _codes(x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool) -> Tensor:
    """Bytes of the codes of every tile, [batch, heads, tiles, bytes]."""
    rows, k = (channels, TILE) if value else (TILE, channels)
    order = group_order_on(x.scale.device, rows, k, form.bits, value)
    if not form.signs:
        return tile_codes(_fill(x.unpacked(), tokens, channels), order, form.bits, TILE)
    numbers = _numbers(x, form, tokens, channels, value)
    numbers = (numbers.transpose(-1, -2) if value else numbers).flatten(2, 3)
    words = tile_codes(numbers >> 1, order, form.bits, TILE).view(torch.int32)
    return (words << 1 | (words < 0)).view(torch.uint8)


def _params(x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool) -> Tensor:
    """Bytes of the scales of every tile, [batch, heads, tiles, bytes]."""
    scale = _by_operand(x, x.scale, form, tokens, channels, value)
    if form.signs:
        return _with_signs(x, scale, form, tokens, channels, value)
    zero = _by_operand(x, x.zero_point, form, tokens, channels, value)
    if form.along_k:
        return _by_runs(_row_pairs(scale), _row_pairs(zero)).flatten(3).view(torch.uint8)
    # [2, .., row groups, k] -> [row group][chunk][t]{4 steps, 4 zero-points}
    split = torch.stack([scale, zero]).unflatten(-1, (-1, 2, 4, 2))
    split[0] = _steps(split[0], form.bits)
    out = split.permute(1, 2, 3, 4, 5, 7, 0, 6, 8)
    return out.flatten(3).contiguous().view(torch.uint8)


def _steps(
    scale: Float[Tensor, "batch heads tiles row_groups chunks half t side"], bits: int
) -> Tensor:
    """Factors of codes, from the scales of tiles."""
    upper = scale * 2.0 ** (6 + bits)
    lower = upper if bits == 4 else upper * 4
    wide = (scale >= MAX_SCALE).flatten(3).any(3)[..., None, None, None, None, None]
    steps = torch.stack([lower[..., 0, :, :], upper[..., 1, :, :]], -3)
    return torch.where(wide, -scale, steps)


def scales_of(
    steps: Float[Tensor, "batch heads tiles row_groups chunks half t side"], bits: int
) -> Tensor:
    """Scales of tiles, from what their codes are multiplied by."""
    upper = steps * 2.0 ** -(6 + bits)
    lower = upper if bits == 4 else upper / 4
    scale = torch.stack([lower[..., 0, :, :], upper[..., 1, :, :]], -3)
    return torch.where(steps.signbit(), -steps, scale)


def _row_pairs(t: Tensor) -> Int[Tensor, "batch heads tiles groups g"]:
    """fp16 numbers of rows by groups as words of rows g, g + 8."""
    split = t.unflatten(-2, (-1, 2, 8)).permute(0, 1, 2, 3, 6, 5, 4)
    # Of an empty tensor contiguous() copies nothing, and a view wants adjacent halves.
    halves = split.clone(memory_format=torch.contiguous_format)
    return halves.view(torch.int32).flatten(3, 4).squeeze(-1)


def _by_runs(*words: Int[Tensor, "batch heads tiles groups g"]) -> Tensor:
    """Words of two groups side by side: [.., groups / 2, g, kinds of words * 2]."""
    return torch.stack(words, -1).unflatten(3, (-1, 2)).permute(0, 1, 2, 3, 5, 6, 4).flatten(5)


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


def _numbers(
    x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool
) -> Int[Tensor, "batch heads tiles rows k"]:
    """The elements' numbers of bits + 1 bits: 2^bits - signed codes, or twice the codes."""
    signed = _fill(x.signed_codes(torch.int16), tokens, channels).unflatten(2, (-1, TILE))
    signed = signed.transpose(-1, -2) if value else signed
    modes = _modes(x, form, tokens, channels, value).repeat_interleave(form.group, -1)
    numbers = torch.where(modes, 2**form.bits - signed, 2 * signed)
    return (numbers & ((2 << form.bits) - 1)).byte()  # where no token is may be anything


def _with_signs(
    x: PackedTensor, scale: Tensor, form: Operand, tokens: int, channels: int, value: bool
) -> Tensor:
    """Scales whose sign bit says "signs", next to words of lowest bits or zero-points."""
    modes = _modes(x, form, tokens, channels, value)
    flagged = torch.where(modes, -2 * scale, scale)  # -0.0 keeps the flag of an empty group
    words = _low_bits(_numbers(x, form, tokens, channels, value) & 1, form.bits)
    if x.slot is not None:
        offset = _by_operand(x, x.offset.half(), form, tokens, channels, value)
        words[..., 0] |= _row_pairs(offset.masked_fill(modes, 0))
    first = _by_runs(_row_pairs(flagged), words[..., 0]).flatten(4)
    second = _by_runs(words[..., 1]).flatten(4)
    return torch.cat([first, second], -1).flatten(3).contiguous().view(torch.uint8)


def _low_bits(bits: Tensor, width: int) -> Int[Tensor, "batch heads tiles groups g word"]:
    """Words 0 and 1 of every group and pair of rows, from bits [.., rows, k]."""
    at = low_bit_places(width, bits.device)
    split = bits.long().unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 4, 2, 2, 2))
    # [.., row tile, i, g, group, q, word, parity, side]
    moved = split.permute(0, 1, 2, 3, 6, 5, 8, 4, 7, 9, 10) << at
    return _as_words(moved.sum((-4, -3, -2, -1))).flatten(3, 4)


def low_bit_places(width: int, device: torch.device) -> Int[Tensor, "i q parity side"]:
    """Places of the lowest bits of elements in their words."""
    q = torch.arange(4, device=device)
    place = 4 * (q % 2) + 2 * (q // 2) if width == 4 else 2 * q
    i, parity, side = (
        torch.arange(2, device=device).view(shape) for shape in ((2, 1, 1, 1), (2, 1), (2,))
    )
    return 16 * i + 8 * side + place.view(4, 1, 1) + parity


def _as_words(x: Tensor) -> Tensor:
    """Numbers below 2^32 as int32."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).int()


def _modes(
    x: PackedTensor, form: Operand, tokens: int, channels: int, value: bool
) -> Bool[Tensor, "batch heads tiles rows groups"]:
    """Groups that are sign and magnitude, by operand."""
    modes = torch.ones_like(x.scale) if x.symmetric is None else x.modes.half()
    return _by_operand(x, modes, form, tokens, channels, value) > 0
