"""Tiles of streams, [batch, kv_heads, tiles, bytes]: filled up, joined, written in place."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from duotone.cache.ragged import Lengths, concatenate

Tiles = UInt8[Tensor, "batch kv_heads tiles bytes"]


def filled(tiles: Tiles, multiple: int) -> Tiles:
    """A whole multiple of tiles; the others are 0."""
    return torch.nn.functional.pad(tiles, (0, 0, 0, -tiles.shape[2] % multiple)).contiguous()


def widened(tiles: Tiles, count: int) -> Tiles:
    """A buffer of `count` tiles that begins with these, filled up with zeros."""
    wide = tiles.new_zeros(*tiles.shape[:2], count, tiles.shape[3])
    kept = min(count, tiles.shape[2])
    wide[:, :, :kept] = tiles[:, :, :kept]
    return wide


def joined(tiles: Tiles, new: Tiles, counts: Lengths, more: Lengths) -> Tiles:
    """`more` tiles of `new` after the first `counts`, per sequence."""
    join = concatenate(counts, more, tiles.shape[2])
    return join.apply(torch.cat([tiles, new], 2))


def put(
    tiles: Tiles, new: Tiles, first: Int[Tensor, " batch"], full: Bool[Tensor, " batch"]
) -> None:
    """tiles[b, :, first[b] :] begins with new[b] where full[b]; nothing asks the host.

    A full sequence that finds no room must fail on the device, not overwrite.
    """
    count = new.shape[2]
    room = first.clamp_max(tiles.shape[2] - count)
    at = torch.where(full, first, room)[:, None] + torch.arange(count, device=first.device)
    index = at[:, None, :, None].expand(new.shape)
    chosen = full[:, None, None, None]
    tiles.scatter_(2, index, torch.where(chosen, new, tiles.gather(2, index)))
