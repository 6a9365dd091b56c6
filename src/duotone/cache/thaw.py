"""Layers with fixed buffers turned back into layers that grow.

A `StaticStore` keeps its window as a ring. The ledger that the buffers were made from says which
tokens they hold after some decode steps; here is where each of them lies.
"""

from __future__ import annotations

from dataclasses import replace

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


def thaw(store: LayerStore, static: StaticStore, slots: Move) -> None:
    """Give a layer its tokens back, out of the buffers that `static` made of it.

    slots: from `chronological`, one for all layers of a ledger.
    """
    store.key, store.value = slots.apply(static.key), slots.apply(static.value)
    store.stream = None if static.stream is None else _stream(static.stream, static.places.stream)


def _stream(pair: PackedPair, lengths: Lengths) -> PackedPair | None:
    """The first `lengths` tokens of a stream, in buffers of their own."""
    longest = int(lengths.max())
    if not longest:
        return None
    key, value = (_first(tensor, lengths.clone(), longest) for tensor in (pair.key, pair.value))
    if pair.records is None:
        return PackedPair(key, value)
    return PackedPair(key, value, pair.records.widened(longest))


def _first(tensor: PackedTensor, lengths: Lengths, longest: int) -> PackedTensor:
    """The first tokens of one buffer; `longest` tokens at most."""
    size = tensor.spec.row_tokens or longest
    blocks = -(-longest // size)
    edges = torch.arange(blocks + 1, device=lengths.device) * size
    kept = {
        name: owned(part[:, :, : longest if tensor._has_token_axis(name) else blocks])
        for name in tensor.tensor_names()
        for part in (getattr(tensor, name),)
    }
    return replace(tensor, blocks=BlockTable(torch.minimum(edges, lengths[:, None])), **kept)
