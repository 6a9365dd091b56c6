"""Tiles of streams, [batch, kv_heads, tiles, bytes]: filled up, joined, written in place."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from duotone.attention.cuda.groups.format import TILE
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.cache import BlockTable
from duotone.cache.ragged import Lengths, Move, concatenate

Tiles = UInt8[Tensor, "batch kv_heads tiles bytes"]
# Of `put`, which also writes parameters.
Rows = Shaped[Tensor, "batch kv_heads _tiles numbers"]


@once_per_table
def from_the_start(take: Move) -> tuple[Lengths, Lengths]:
    """(whole tiles of the taken tokens, the tile 0 at which they begin), equal for all layers."""
    tiles = take.lengths // TILE
    return tiles, torch.zeros_like(tiles)


def filled(tiles: Tiles, multiple: int) -> Tiles:
    """A whole multiple of tiles; the others are 0."""
    return torch.nn.functional.pad(tiles, (0, 0, 0, -tiles.shape[2] % multiple)).contiguous()


def widened(tiles: Tiles, count: int) -> Tiles:
    """A buffer of `count` tiles that begins with these, filled up with zeros."""
    wide = tiles.new_zeros(*tiles.shape[:2], count, tiles.shape[3])
    kept = min(count, tiles.shape[2])
    wide[:, :, :kept] = tiles[:, :, :kept]
    return wide


@once_per_table
def holds_whole_tiles(held: BlockTable) -> bool:
    """True where every sequence ends with a full tile. The host waits once for all layers."""
    return not bool((held.lengths % TILE).any())


def joined(tiles: Tiles, new: Tiles, held: BlockTable, more: BlockTable) -> Tiles:
    """Tiles of `more` tokens after those of `held` ones, per sequence."""
    return _join(held, more, tiles.shape[2]).apply(torch.cat([tiles, new], 2))


@once_per_table
def _join(held: BlockTable, more: BlockTable, tiles: int) -> Move:
    """Join new tiles after those of a buffer of `tiles`. The host waits once for all layers."""
    return concatenate(held.lengths // TILE, -(-more.lengths // TILE), tiles)


def put(tiles: Rows, new: Rows, first: Int[Tensor, " batch"], full: Bool[Tensor, " batch"]) -> None:
    """tiles[b, :, first[b] :] begins with new[b] where full[b]; nothing asks the host.

    A full sequence that finds no room must fail on the device, not overwrite.
    """
    count = new.shape[2]
    room = first.clamp_max(tiles.shape[2] - count)
    at = torch.where(full, first, room)[:, None] + torch.arange(count, device=first.device)
    index = at[:, None, :, None].expand(new.shape)
    chosen = full[:, None, None, None]
    tiles.scatter_(2, index, torch.where(chosen, new, tiles.gather(2, index)))
