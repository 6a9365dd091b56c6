"""Tiles of group records as packed tensors in canonical order: what `group_layout` does, undone."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.groups.format import TILE, Operand
from duotone.attention.cuda.groups.layout import group_order, low_bit_places, scales_of
from duotone.attention.cuda.groups.tiles import Tiles, widened
from duotone.attention.cuda.spans.layout import untile_codes
from duotone.cache import PackedTensor
from duotone.quant import pack
from duotone.quant.slots import fill_slots, has_slot, slot_bytes


def taken_apart(
    x: PackedTensor, form: Operand, channels: int, codes: Tiles | None, params: Tiles, value: bool
) -> PackedTensor:
    """K or V with its tensors in canonical order; codes: None where another layer keeps them."""
    rows, k = (channels, TILE) if value else (TILE, channels)
    if form.signs:
        return replace(x, **_signed_parts(x, form, (codes, params), (rows, k), value))
    numbers = params.contiguous().view(torch.int32)
    if form.along_k:
        scale, zero = (_rows_of(words, rows) for words in _runs_of(numbers, 2))
    else:
        halves = numbers.view(torch.float16).unflatten(-1, (-1, k // 16, 4, 2, 2, 2))
        # [steps or zero-points, .., row groups, chunk, half of the chunk, t, side]
        steps, starts = halves.permute(6, 0, 1, 2, 3, 4, 7, 5, 8)
        scale, zero = scales_of(steps, form.bits).flatten(-4), starts.flatten(-4)
    return replace(
        x,
        codes=None if codes is None else _codes(x, form, codes, (rows, k), value),
        scale=_by_tokens(x, scale, value),
        zero_point=_by_tokens(x, zero, value),
    )


def _codes(
    x: PackedTensor, form: Operand, tiles: Tiles, size: tuple[int, int], value: bool
) -> UInt8[Tensor, "batch heads tokens bytes"]:
    order = group_order(*size, form.bits, value)
    plain = untile_codes(tiles, order, form.bits, TILE)[:, :, : x.tokens, : x.head_dim]
    return pack(plain.contiguous(), form.bits)


def _runs_of(words: Tensor, kinds: int) -> Int[Tensor, "kinds batch heads tiles n g"]:
    """Inverse of `groups.layout._by_runs`."""
    split = words.unflatten(-1, (-1, 8, kinds, 2))
    return split.permute(5, 0, 1, 2, 3, 6, 4).flatten(4, 5)


def _rows_of(words: Tensor, rows: int) -> Float[Tensor, "batch heads tiles rows groups"]:
    """Inverse of `groups.layout._row_pairs`."""
    halves = words.unsqueeze(-1).contiguous().view(torch.float16)
    split = halves.unflatten(3, (rows // 16, -1))
    return split.permute(0, 1, 2, 3, 6, 5, 4).flatten(3, 5)


def _by_tokens(x: PackedTensor, parameter: Tensor, value: bool) -> Tensor:
    """A parameter of tiles as `PackedTensor` has it, one row per token or per block."""
    tiled = parameter.transpose(4, 3) if value else parameter
    if x.per_token:
        columns = -(-x.head_dim // (x.spec.group or x.head_dim))
        return tiled.flatten(2, 3)[:, :, : x.tokens, :columns].contiguous()
    rows = tiled[:, :, :: x.spec.group // TILE, 0, : x.head_dim]
    # The table may end in blocks without tokens.
    return widened(rows, x.blocks.blocks)


def _signed_parts(
    x: PackedTensor,
    form: Operand,
    tiles: tuple[Tiles, Tiles],
    size: tuple[int, int],
    value: bool,
) -> dict[str, Tensor]:
    """All tensors of K or V with signs."""
    rows = size[0]
    pairs = tiles[1].contiguous().view(torch.int32).unflatten(-1, (-1, 48))
    flagged, first = _runs_of(pairs[..., :32].flatten(-2), 2)
    (second,) = _runs_of(pairs[..., 32:].flatten(-2), 1)
    scale = _rows_of(flagged, rows)
    symmetric = scale.signbit()
    numbers = 2 * _upper_bits(tiles[0], form, size, value)
    numbers += _low_bits(torch.stack([first, second], -1), rows, form.bits)
    modes = symmetric.repeat_interleave(form.group, -1)
    signed = torch.where(modes, 2**form.bits - numbers, numbers >> 1)
    found = {
        "codes": pack(_to_tokens(x, signed.abs().byte(), value), form.bits),
        "scale": _by_tokens(x, torch.where(symmetric, scale.abs() / 2, scale), value),
    }
    negative = signed < 0
    if not has_slot(x.spec):
        return found | {"negative": pack(_to_tokens(x, negative.byte(), value), 1)}
    zero = _rows_of(first, rows).masked_fill(symmetric, 0)
    return found | _slots(x, zero, negative.unflatten(-1, (-1, form.group)), symmetric, value)


def _upper_bits(
    codes: Tiles, form: Operand, size: tuple[int, int], value: bool
) -> Int[Tensor, "batch heads tiles rows k"]:
    """All bits of the elements' numbers but the lowest."""
    words = codes.contiguous().view(torch.int32)
    rotated = (words >> 1 & 0x7FFFFFFF) | words << 31
    order = group_order(*size, form.bits, value)
    plain = untile_codes(rotated.view(torch.uint8), order, form.bits, TILE).long()
    tiled = plain.unflatten(2, (-1, TILE))
    return tiled.transpose(-1, -2) if value else tiled


def _low_bits(words: Tensor, rows: int, width: int) -> Int[Tensor, "batch heads tiles rows k"]:
    """Inverse of `groups.layout._low_bits`. words: [batch, heads, tiles, n, g, 2]."""
    # [.., row tile, group, g, word] -> [.., row tile, i, g, group, q, word, parity, side]
    split = words.long().unflatten(3, (rows // 16, -1)).transpose(4, 5)
    spread = split[:, :, :, :, None, :, :, None, :, None, None]
    bits = spread >> low_bit_places(width, words.device)[:, None, None, :, None] & 1
    return bits.flatten(3, 5).flatten(4)


def _to_tokens(x: PackedTensor, elements: Tensor, value: bool) -> Tensor:
    """Elements of tiles [.., rows, k] as [batch, heads, tokens, head_dim]."""
    tiled = elements.transpose(-1, -2) if value else elements
    return tiled.flatten(2, 3)[:, :, : x.tokens, : x.head_dim].contiguous()


def _slots(
    x: PackedTensor, zero: Tensor, negative: Tensor, symmetric: Tensor, value: bool
) -> dict[str, Tensor]:
    """Signs that a hybrid keeps next to codes and scales. negative: [.., rows, groups, group]."""
    modes = _by_tokens(x, symmetric, value)
    signs = [_by_tokens(x, part, value) for part in (negative & symmetric[..., None]).unbind(-1)]
    width = slot_bytes(x.spec, x.head_dim)
    slots = fill_slots(_by_tokens(x, zero, value), torch.stack(signs, -1), modes, width)
    return {"slot": slots, "symmetric": pack(modes.byte(), 1)}
