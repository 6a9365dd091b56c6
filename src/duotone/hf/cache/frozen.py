"""A cache's tokens in fixed buffers for as long as every step brings one token per sequence.

A `QuantizedCache` freezes after its prompt, decodes, and thaws before anything else is asked of
it: a longer step, a crop, a change of rows, a file. Its ledgers rest meanwhile; the number of steps
alone says what has become of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.static import StaticDecoder
from duotone.cache import (
    MemoryReport,
    StaticPlaces,
    StaticStore,
    static_memory_report,
    thaw,
)
from duotone.cache.alike import OF_PROMPTS, Structure
from duotone.cache.ragged import Move
from duotone.cache.static import check_frozen, settle_orders
from duotone.cache.thaw import chronological

if TYPE_CHECKING:
    from duotone.hf.cache.cache import QuantizedCache

# Prompts whose lengths differ by less may have buffers of equal size.
MULTIPLE = 64
# What a layer still holds while it is frozen.
TAKEN_OVER = ("visual", "background", "key_norm")


class Frozen:
    """Fixed buffers of all layers of one cache, with room for `room` more tokens.

    Errors: ValueError, before anything is changed, for a cache that cannot freeze.
    """

    def __init__(self, cache: QuantizedCache, room: int) -> None:
        _check(cache)
        self.start, self.room = cache.steps.length, room
        stores, self._orders = _frozen_stores(cache, room)
        self.decoder = StaticDecoder(stores, cache.spec.tau, cache.impl, cache.slow)
        self._broke_off = self.is_thawed = False
        # What the sequences have become of those at the start, by number.
        self.rows: Int[Tensor, " batch"] | None = None

    @cached_property
    def structure(self) -> Structure:
        """All that launches on these buffers depend on."""
        return Structure.of([self.decoder.stores, self.decoder.tau, self.decoder.impl])

    @property
    def is_usable(self) -> bool:
        """True where nobody else has the buffers: the cache gave none of them back."""
        return not (self.is_thawed or self._broke_off)

    def move_into(self, other: Frozen, cache: QuantizedCache) -> bool:
        """Go on in the buffers of `other`, where they are alike; False: they are not.

        cache: of this object, before its first step. `other` has no cache any more.
        """
        if self.room != other.room or not self.structure.is_like(other.structure):
            return False
        other.structure.copy_from(self.structure)
        for ours, theirs in zip(self.decoder.places, other.decoder.places, strict=True):
            for name in OF_PROMPTS:
                object.__setattr__(theirs, name, getattr(ours, name))
        self.decoder, self.structure = other.decoder, other.structure
        self.decoder.steps, self.decoder.slow = 0, cache.slow
        for layer, static in zip(cache.layers, self.decoder.stores, strict=True):
            for name in TAKEN_OVER:
                setattr(layer.store, name, getattr(static, name))
        return True

    def reorder(self, index: Int[Tensor, " batch"]) -> None:
        """Make sequence b a copy of sequence index[b], in place.

        Flushes stay due where they are due for any sequence: the device finds whose.
        """
        self.rows = index if self.rows is None else self.rows[index]
        kept = {id(x) for store in self.decoder.stores for x in store.indices}
        with torch.inference_mode(False), torch.no_grad():
            self.structure.reorder(index, but=kept)
        for places in self.decoder.places:
            object.__setattr__(places, "evicted", places.evicted.rows(index))

    @contextmanager
    def step(self) -> Iterator[None]:
        """A decode step, begun and ended: a cache whose step broke off is of no use."""
        self._broke_off = True
        yield
        self.decoder.steps += 1
        self._broke_off = False

    @property
    def steps(self) -> int:
        """Steps since the cache froze."""
        return self.decoder.steps

    @property
    def length(self) -> int:
        """Logical length, padding included."""
        return self.start + self.steps

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.structure.nbytes

    def memory(self, cache: QuantizedCache) -> MemoryReport:
        """Bytes of all buffers, free slots included, and of the ledgers that rest meanwhile."""
        resting = [x for ledger in cache.steps.ledgers for x in ledger.state.tensors]
        resting += [x for order in self._orders for x in (order.index, order.lengths)]
        nominal = cache.spec.nominal_bits(cache.facts.layers)
        return static_memory_report(self.decoder.stores, nominal, resting)

    def thaw(self, cache: QuantizedCache) -> None:
        """Give the cache's layers and ledgers the tokens back.

        Errors: RuntimeError after a step that broke off.
        """
        if self._broke_off:
            raise RuntimeError(
                "the last decode step broke off, so the cache is not consistent any more. Start "
                "again with a new cache."
            )
        self.is_thawed = True
        slots: dict[int, Move] = {}
        for layer, static, order in zip(
            cache.layers, self.decoder.stores, self._orders, strict=True
        ):
            key = id(static.places)
            if key not in slots:
                state = cache.steps.ledgers[layer.index].state
                if self.rows is not None:
                    state, order = state.reordered(self.rows), order.rows(self.rows)
                slots[key] = chronological(static.places, state, order)
            thaw(layer.store, static, slots[key])
        for ledger in {id(ledger): ledger for ledger in cache.steps.ledgers}.values():
            ledger.decoded(self.steps, self.rows)


def _check(cache: QuantizedCache) -> None:
    """Raise ValueError for a cache that fixed buffers cannot hold."""
    if not cache.steps.length:
        raise ValueError("an empty cache cannot be frozen; run the model with it first.")
    if any(cache.facts.sliding):
        raise ValueError(
            "fixed buffers do not read the masks that sliding windows need; "
            f"{cache.facts.model_type!r} has such layers. Decode in buffers that grow."
        )
    if cache.spec.share is not None and cache.spec.share.weights is not None:
        raise ValueError(
            "fixed buffers are flushed layer by layer and cannot average the codes of several; got "
            "Sharing.weights. Decode in buffers that grow."
        )


def _frozen_stores(cache: QuantizedCache, room: int) -> tuple[list[StaticStore], list[Move]]:
    """(layers of a prefilled cache in fixed buffers, the order of each one's dense tokens).

    room: for later tokens. The layers lose their dense tokens and their streams, one after the
    other.
    """
    made: dict[int, Any] = {}
    for layer in cache.layers:
        state = cache.steps.state(layer.index)
        if id(state) not in made:
            made[id(state)] = StaticPlaces.of(state, cache.spec, room, MULTIPLE)
        check_frozen(layer.store)
    settle_orders([layer.store for layer in cache.layers])
    stores, orders = [], []
    for layer in cache.layers:
        places, order = made[id(cache.steps.state(layer.index))]
        stores.append(StaticStore(layer.store, places, order))
        orders.append(order)
        # One layer's tokens are there twice, not all.
        layer.store.key = layer.store.value = layer.store.stream = None
    for index, layer in enumerate(cache.layers):
        sources = {
            which: stores[cache.spec.source(which, index, len(stores))]
            for which in layer.store.sources
        }
        stores[index].share(sources)
    return stores, orders
