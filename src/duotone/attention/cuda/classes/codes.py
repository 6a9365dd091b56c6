"""Codes of tiles, class by class, in the order in which lanes read them (`class_layout`)."""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import COLUMN, Classes, ClassFormat
from duotone.attention.cuda.spans.layout import (
    TILE,
    key_order,
    take_tokens,
    tile_codes,
    untile_codes,
    value_order,
    words_per_vector,
)


def class_codes(codes: Tensor, token: Tensor, classes: Classes, value: bool) -> Tensor:
    """Bytes of the codes of every tile, [batch, heads, tiles, bytes]; codes: sorted by class."""
    taken, start, words = take_tokens(codes, token, codes.shape[3]), 0, []
    order = value_order if value else key_order
    for (bits, n), columns in zip(classes.sizes, classes.columns, strict=True):
        filled = torch.nn.functional.pad(taken[..., start : start + n], (0, columns * COLUMN - n))
        tiles = tile_codes(filled, order(columns * COLUMN, bits, 1), bits, TILE)
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
    order = value_order if value else key_order
    parts = []
    for (bits, n), columns, part in zip(
        classes.sizes, classes.columns, words.split(classes.words, 3), strict=True
    ):
        codes = untile_codes(part.flatten(3), order(columns * COLUMN, bits, 1), bits, TILE)
        parts.append(codes[..., :n])
    joined = torch.nn.functional.pad(torch.cat(parts, -1), (0, form.head_dim - classes.channels))
    return joined.gather(2, slot[:, None, :, None].expand(-1, joined.shape[1], -1, form.head_dim))
