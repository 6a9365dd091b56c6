"""Codes of tiles, class by class, in the order in which lanes read them (`class_layout`)."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.classes.format import HALF, Classes, ClassFormat
from duotone.attention.cuda.spans.layout import (
    TILE,
    coordinates,
    key_order,
    take_tokens,
    tile_codes,
    untile_codes,
    value_order,
    words_per_vector,
)
from duotone.tools.kept import cached_once, kept


def class_codes(codes: Tensor, token: Tensor, classes: Classes, value: bool) -> Tensor:
    """Bytes of the codes of every tile, [batch, heads, tiles, bytes]; codes: sorted by class."""
    taken, start, words = take_tokens(codes, token, codes.shape[3]), 0, []
    for bits, n, places in classes.pieces:
        filled = torch.nn.functional.pad(taken[..., start : start + n], (0, places - n))
        tiles = tile_codes(filled, _order_on(codes.device, places, bits, value), bits, TILE)
        words.append(tiles.unflatten(-1, (-1, 32, 4)))
        start += n
    joined = torch.cat(words, 3)
    unit = words_per_vector(joined.shape[3])
    return joined.unflatten(3, (-1, unit)).transpose(4, 5).flatten(3)


def from_class_codes(tiles: Tensor, slot: Tensor, form: ClassFormat, value: bool) -> Tensor:
    """Inverse of `class_codes`: codes of the tokens, sorted by class, 0 bits last."""
    classes = form.value if value else form.key
    unit = words_per_vector(sum(classes.words))
    words = tiles.unflatten(-1, (-1, 32, unit, 4)).transpose(4, 5).flatten(3, 4)
    parts = []
    for (bits, n, places), part in zip(classes.pieces, words.split(classes.words, 3), strict=True):
        order = _order_on(tiles.device, places, bits, value)
        codes = untile_codes(part.flatten(3), order, bits, TILE)
        parts.append(codes[..., :n])
    joined = torch.nn.functional.pad(torch.cat(parts, -1), (0, form.head_dim - classes.channels))
    return joined.gather(2, slot[:, None, :, None].expand(-1, joined.shape[1], -1, form.head_dim))


@cached_once
def _order_on(device: torch.device, places: int, bits: int, value: bool) -> Tensor:
    """`_order` on a device, copied once: a copy cannot be captured."""
    return kept(lambda: _order(places, bits, value).to(device), device)


def _order(places: int, bits: int, value: bool) -> Int[Tensor, "bytes codes"]:
    """Element, token * places + place, in each slot of a piece of a tile."""
    if places == HALF:
        return _half_order(bits, value)
    return (value_order if value else key_order)(places, bits, 1)


@cache
def _half_order(bits: int, value: bool) -> Int[Tensor, "bytes codes"]:
    """`_order` of a half column, whose registers have 4 bytes of 64 tokens and 8 channels.

    With g = lane / 4 and t = lane % 4, byte j of register e has code
        K: token 8 e + g + 32 (t / 2), channel 4 (t % 2) + j
        V: token 32 (e / 2) + 8 (e % 2) + 2 t + 16 (j % 2) + j / 2, channel g
    """
    lane, j, e = coordinates(HALF, bits, 1)
    g, t = lane // 4, lane % 4
    if value:
        token = 32 * (e // 2) + 8 * (e % 2) + 2 * t + 16 * (j % 2) + j // 2
        return token * HALF + g
    return (8 * e + g + 32 * (t // 2)) * HALF + 4 * (t % 2) + j
