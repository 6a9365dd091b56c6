"""Layers with fixed buffers turned back into layers that grow.

A `StaticStore` keeps its window as a ring. The ledger that the buffers were made from says which
tokens they hold after some decode steps; here is where each of them lies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from duotone.cache.blocks import BlockTable
from duotone.cache.index import LedgerState
from duotone.cache.layer import LayerStore
from duotone.cache.packed import PackedTensor
from duotone.cache.pair import PackedPair
from duotone.cache.places import StaticPlaces
from duotone.cache.ragged import Lengths, Move, owned, valid_mask
from duotone.cache.static import StaticStore


def chronological(places: StaticPlaces, frozen: LedgerState, order: Move) -> Move:
    """Slots of the dense tokens of each sequence, the oldest first.

    places: after some steps. frozen: the ledger's state when they were made. order: the order in
    which its dense tokens entered the buffers, from `StaticPlaces.of`.
    """
    began = frozen.dense.lengths[:, None]
    positions = order.apply_flat(frozen.dense.positions).long()
    slot = torch.arange(int(places.dense.max()), device=began.device).expand(len(began), -1)
    fixed = places.fixed[:, None]
    # Of the tokens that may leave, counted from the first there was.
    gone = (places.stream - frozen.stream.lengths)[:, None]
    age = slot - fixed
    ring = (places.head[:, None] + age) % max(places.recent, 1)
    moved = fixed + torch.where(age < places.recent, ring, age)
    entered = torch.where(age < 0, slot, slot + gone)
    # A token that came later, whichever sequence it is of, has no place among the old ones.
    padded = torch.nn.functional.pad(positions, (0, 1))
    old = padded.gather(1, entered.clamp_max(positions.shape[1]))
    position = torch.where(entered < began, old, frozen.seen + entered - began)
    valid = valid_mask(places.dense, slot.shape[1])
    late = torch.iinfo(position.dtype).max
    rank = torch.sort(torch.where(valid, position, late), dim=-1, stable=True).indices
    return Move(torch.where(age < 0, slot, moved).gather(1, rank), places.dense.clone())


class StreamTables:
    """Tables of blocks of thawed streams: one object of each kind for all layers of a ledger.

    lengths: tokens of each sequence's stream, which later steps in the buffers change.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths.clone()
        self._known: dict[int | None, BlockTable] = {}

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest stream."""
        return int(self.lengths.max())

    def of(self, tensor: PackedTensor) -> BlockTable:
        """Table of the blocks that share parameters of a tensor."""
        rows = tensor.spec.row_tokens
        # K and V have two tables though they be equal: each remembers what is appended to it.
        if rows not in self._known:
            size = rows or self.longest
            edges = torch.arange(-(-self.longest // size) + 1, device=self.lengths.device) * size
            self._known[rows] = BlockTable(torch.minimum(edges, self.lengths[:, None]))
        return self._known[rows]


def thaw(store: LayerStore, static: StaticStore, slots: Move, tables: StreamTables) -> None:
    """Give a layer its tokens back, out of the buffers that `static` made of it.

    slots: from `chronological`. Both are one for all layers of a ledger.
    """
    store.key, store.value = slots.apply(static.key), slots.apply(static.value)
    store.stream = None if static.stream is None else _stream(static.stream, tables)


def _stream(pair: PackedPair, tables: StreamTables) -> PackedPair | None:
    """The tokens of a stream, in buffers of their own."""
    if not tables.longest:
        return None
    key, value = (_first(tensor, tables) for tensor in (pair.key, pair.value))
    if pair.records is None:
        return PackedPair(key, value)
    return PackedPair(key, value, pair.records.widened(tables.longest))


def _first(tensor: PackedTensor, tables: StreamTables) -> PackedTensor:
    """The tokens of one buffer."""
    blocks, longest = tables.of(tensor), tables.longest
    kept = {
        name: owned(part[:, :, : longest if tensor._has_token_axis(name) else blocks.blocks])
        for name in tensor.tensor_names()
        for part in (getattr(tensor, name),)
    }
    return replace(tensor, blocks=blocks, **kept)
