"""A cache's tokens in fixed buffers for as long as every step brings one token per sequence.

A cache freezes after its prompt, decodes, and thaws before anything else is asked of it: a longer
step, a crop, a change of rows, a file. Its ledgers rest meanwhile; the number of steps alone says
what has become of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.static import StaticDecoder
from duotone.cache import (
    LayerStore,
    Ledger,
    MemoryReport,
    StaticPlaces,
    StaticStore,
    static_memory_report,
    thaw,
)
from duotone.cache.alike import OF_PROMPTS, Structure
from duotone.cache.index import LedgerState
from duotone.cache.ragged import Move
from duotone.cache.static import LAG, check_frozen, settle_orders
from duotone.cache.thaw import StreamTables, chronological
from duotone.hf.cache.scales import KeyScales
from duotone.hf.model.facts import ModelFacts
from duotone.quant import CacheSpec
from duotone.quant.autocast import without_autocast
from duotone.tools.slow_paths import SlowPaths

# Prompts whose lengths differ by less may have buffers of equal size.
MULTIPLE = 64
# What a layer still holds while it is frozen.
TAKEN_OVER = ("visual", "background", "key_norm")


class Frozen:
    """Fixed buffers of all layers of one cache, with room for `room` more tokens.

    decoder: of these buffers. orders: in which the dense tokens of each layer entered them. start:
    logical length when they were made. states: of layers that stay transformers' own,
    which the model writes in place. scales: of keys, in tensors that a capture reads.
    """

    def __init__(
        self,
        decoder: StaticDecoder,
        orders: list[Move],
        start: int,
        room: int,
        states: dict[str, Tensor],
        scales: KeyScales,
    ) -> None:
        self.decoder, self._orders = decoder, orders
        self.states, self.scales = states, scales
        self.start, self.room = start, room
        self._broke_off = self.is_thawed = False
        # What the sequences have become of those at the start, by number.
        self.rows: Int[Tensor, " batch"] | None = None

    @cached_property
    def structure(self) -> Structure:
        """All that launches on these buffers depend on."""
        decoder = self.decoder
        return Structure.of(
            [decoder.stores, decoder.tau, decoder.impl, self.states, self.scales.each]
        )

    @property
    def is_usable(self) -> bool:
        """True where nobody else has the buffers: the cache gave none of them back."""
        return not (self.is_thawed or self._broke_off)

    def move_into(self, other: Frozen, stores: Sequence[LayerStore], slow: SlowPaths) -> bool:
        """Go on in the buffers of `other`, where they are alike; False: they are not.

        stores: of this object's cache, before its first step. slow: warnings of its model. `other`
        has no cache any more. The cache must go on with `states` afterwards.
        """
        if self.room != other.room or not self.structure.is_like(other.structure):
            return False
        other.structure.copy_from(self.structure)
        for ours, theirs in zip(self.decoder.places, other.decoder.places, strict=True):
            for name in OF_PROMPTS:
                object.__setattr__(theirs, name, getattr(ours, name))
        self.decoder, self.structure = other.decoder, other.structure
        self.decoder.steps, self.decoder.slow = 0, slow
        for store, static in zip(stores, self.decoder.stores, strict=True):
            for name in TAKEN_OVER:
                setattr(store, name, getattr(static, name))
        self.states, self.scales = other.states, other.scales
        return True

    def reorder(self, index: Int[Tensor, " batch"]) -> None:
        """Make sequence b a copy of sequence index[b], in place.

        Flushes stay due where they are due for any sequence: the device finds whose.
        """
        self.rows = index if self.rows is None else self.rows[index]
        kept = {id(x) for store in self.decoder.stores for x in store.indices}
        kept |= {id(x) for x in self.scales.tensors}
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

    def memory(self, states: Iterable[LedgerState], nominal_bits: float) -> MemoryReport:
        """Bytes of all buffers, free slots included, and of the ledgers that rest meanwhile."""
        resting = [x for state in states for x in state.tensors]
        resting += [x for order in self._orders for x in (order.index, order.lengths)]
        report = static_memory_report(self.decoder.stores, nominal_bits, resting)
        return report.with_params(self.scales.nbytes)

    def thaw(self, stores: Sequence[LayerStore], ledgers: Sequence[Ledger]) -> None:
        """Give the cache's layers and ledgers the tokens back.

        Errors: RuntimeError after a step that broke off.
        """
        if self._broke_off:
            raise RuntimeError(
                "the last decode step broke off, so the cache is not consistent any more. Start "
                "again with a new cache."
            )
        self.is_thawed = True
        statics = self.decoder.stores
        with without_autocast(statics[0].key.device):
            found: dict[int, tuple[Move, StreamTables]] = {}
            for store, static, order, ledger in zip(
                stores, statics, self._orders, ledgers, strict=True
            ):
                key = id(static.places)
                if key not in found:
                    slots = self._slots(static, ledger.state, order)
                    found[key] = slots, StreamTables(static.places.stream)
                thaw(store, static, *found[key])
            for ledger in {id(ledger): ledger for ledger in ledgers}.values():
                ledger.decoded(self.steps, self.rows)

    def _slots(self, static: StaticStore, state: LedgerState, order: Move) -> Move:
        """Slots of a layer's dense tokens, the oldest first, in the sequences of now."""
        if self.rows is not None:
            state, order = state.reordered(self.rows), order.rows(self.rows)
        return chronological(static.places, state, order)


def check_freezes(length: int, spec: CacheSpec, facts: ModelFacts) -> None:
    """Raise ValueError for a cache that fixed buffers cannot hold."""
    if not length:
        raise ValueError("an empty cache cannot be frozen; run the model with it first.")
    if why := facts.against_kernels:
        raise ValueError(f"fixed buffers need kernels: {why}. Decode in buffers that grow.")
    if facts.attends_across:
        raise ValueError(
            f"fixed buffers hold tokens alone, and layers of {facts.model_type!r} attend to "
            "pictures as well. Decode in buffers that grow."
        )
    if facts.is_indexed:
        raise ValueError(
            f"fixed buffers do not read the masks by which indexers of {facts.model_type!r} choose "
            "tokens. Decode in buffers that grow."
        )
    if any(facts.sliding):
        raise ValueError(
            "fixed buffers do not read the masks that packed sliding windows need; all layers of "
            f"{facts.model_type!r} have windows. Decode in buffers that grow."
        )
    if facts.windows and spec.evict is not None:
        raise ValueError(
            "windows in fixed buffers know padding by the tokens that are stored, and this scheme "
            "evicts some. Decode in buffers that grow."
        )
    if spec.share is not None and spec.share.weights is not None:
        raise ValueError(
            "fixed buffers are flushed layer by layer and cannot average the codes of several; got "
            "Sharing.weights. Decode in buffers that grow."
        )
    if any(tensor.lag for tensor in spec.tensors):
        raise ValueError(f"{LAG} Decode in buffers that grow.")


def frozen_stores(
    layers: Sequence[LayerStore], states: Sequence[LedgerState], spec: CacheSpec, room: int
) -> tuple[list[StaticStore], list[Move]]:
    """(layers of a prefilled cache in fixed buffers, the order of each one's dense tokens).

    room: for later tokens. The layers lose their dense tokens and their streams, one after the
    other. Errors: ValueError, before anything is changed, for a layer that cannot freeze.
    """
    made: dict[int, Any] = {}
    for layer, state in zip(layers, states, strict=True):
        if id(state) not in made:
            made[id(state)] = StaticPlaces.of(state, spec, room, MULTIPLE)
        check_frozen(layer)
    settle_orders(layers)
    stores, orders = [], []
    for layer, state in zip(layers, states, strict=True):
        places, order = made[id(state)]
        stores.append(StaticStore(layer, places, order))
        orders.append(order)
        # One layer's tokens are there twice, not all.
        layer.key = layer.value = layer.stream = None
    for index, layer in enumerate(layers):
        sources = {which: stores[spec.source(which, index, len(stores))] for which in layer.sources}
        stores[index].share(sources)
    return stores, orders
