"""Memory numbers: every byte that the cache holds, and the bytes of a 16-bit cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from duotone.cache.index import STORES, LedgerState, Roll
from duotone.cache.layer import LayerStore
from duotone.cache.pair import PackedPair
from duotone.cache.places import StaticPlaces
from duotone.cache.ragged import held_bytes
from duotone.cache.static import StaticStore

Store = LayerStore | StaticStore
# The stores of visual tokens.
SPANS = ("visual", "background")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache, over all layers and sequences.

    codes_bytes, params_bytes: packed codes (with signs); scales, zero-points, mode bits and norms.
    dense_bytes: tokens in the model's dtype, spare slots of their buffers included.
    index_bytes: the ledger's positions, lengths and block tables, shared by all layers unless
        each evicts tokens of its own.
    dense_equivalent_bytes: what the model's own cache would hold, without padding or spare slots.
        Evicted tokens count here, though they take no bytes. Of layers with a sliding window, the
        tokens of the window count.
    bits_per_element: true bits per number of K and V over the whole cache, all of the above.
    visual_*: the same for the packed visual tokens alone (with their share of the index).
    nominal_bits: the papers' count, codes only.
    state_bytes: of layers that stay transformers' own, states of fixed size and sliding windows in
        16 bit. They are in both totals, since the model's own cache holds them too, and not in the
        bits per number.
    """

    codes_bytes: int
    params_bytes: int
    dense_bytes: int
    index_bytes: int
    total_bytes: int
    dense_equivalent_bytes: int
    bits_per_element: float
    visual_bytes: int
    visual_dense_equivalent_bytes: int
    visual_bits_per_element: float
    nominal_bits: float
    state_bytes: int = 0

    def with_states(self, nbytes: int) -> MemoryReport:
        """Report of a cache that holds so many bytes of states as well."""
        totals = {
            name: getattr(self, name) + nbytes for name in ("total_bytes", "dense_equivalent_bytes")
        }
        return replace(self, state_bytes=nbytes, **totals)

    def with_params(self, nbytes: int) -> MemoryReport:
        """Report of a cache with so many more bytes of parameters, which all tokens share."""
        total = self.total_bytes + nbytes
        bits = self.bits_per_element * total / max(self.total_bytes, 1)
        params = self.params_bytes + nbytes
        return replace(self, params_bytes=params, total_bytes=total, bits_per_element=bits)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return asdict(self)

    def __str__(self) -> str:
        """Lines for the whole cache, for its visual tokens, and for each part."""
        whole = self.total_bytes, self.dense_equivalent_bytes, self.bits_per_element
        lines = [_line("cache", *whole)]
        if self.visual_bytes:
            visual = self.visual_bytes, self.visual_dense_equivalent_bytes
            lines.append(_line("  visual tokens", *visual, self.visual_bits_per_element))
        names = ("codes", "params", "dense", "index")
        for name in (*names, "state") if self.state_bytes else names:
            lines.append(f"{'  ' + name:<16}{getattr(self, name + '_bytes'):>15,} bytes")
        return "\n".join(lines)


def _line(name: str, stored: int, dense: int, bits: float) -> str:
    return f"{name:<16}{stored:>15,} bytes instead of {dense:,}, {bits:.2f} true bits per number"


def memory_report(
    stores: Iterable[LayerStore],
    states: Sequence[LedgerState],
    nominal_bits: float,
    window: int | None = None,
) -> MemoryReport:
    """Count the bytes of all layers of one cache.

    states: one per layer; where layers share a ledger, the same object. window: tokens that a query
        of these layers sees, itself included, where the model's own cache keeps no others.
    """
    pairs = [pair for pair in zip(stores, states, strict=True) if pair[0].key is not None]
    ledgers = {id(state): state for _, state in pairs}.values()
    spans = [getattr(state, name) for state in ledgers for name in SPANS]
    report = _counted(
        [(store, int(_tokens(state).sum()), _visual_tokens(state)) for store, state in pairs],
        index_bytes=sum(held_bytes(state.tensors) for state in ledgers),
        visual_index_bytes=sum(roll.index_bytes for roll in spans),
        nominal_bits=nominal_bits,
    )
    if window is None:
        return report
    kept = (
        int(_tokens(state).clamp(max=window - 1).sum()) * _token_bytes(store)
        for store, state in pairs
    )
    return replace(report, dense_equivalent_bytes=sum(kept))


def static_memory_report(
    stores: Sequence[StaticStore], nominal_bits: float, resting: Iterable[Tensor] = ()
) -> MemoryReport:
    """Count the bytes of a cache with fixed buffers, unused slots included.

    stores: one per layer. resting: tensors that the cache keeps until it thaws. Lengths are copied
    from the device: not for a captured step.
    """
    places = {id(store.places): store.places for store in stores}.values()
    slots = sum(store.index_bytes for store in stores)
    index = [x for place in places for x in place.tensors]
    return _counted(
        [(store, _placed(store.places), _placed_visual(store.places)) for store in stores],
        index_bytes=slots + held_bytes([*index, *resting]),
        visual_index_bytes=sum(p.visual.nbytes + p.background.nbytes for p in places),
        nominal_bits=nominal_bits,
    )


def _counted(
    layers: Sequence[tuple[Store, int, int]],
    *,
    index_bytes: int,
    visual_index_bytes: int,
    nominal_bits: float,
) -> MemoryReport:
    """Report on layers: (store, tokens, visual tokens). The index bytes leave out block tables."""
    stores = [store for store, _, _ in layers]
    visual = _pairs(stores, SPANS)
    packed = visual + _pairs(stores, ("stream",))
    codes_bytes = sum(pair.codes_bytes for pair in packed)
    params_bytes = sum(pair.params_bytes for pair in packed)
    params_bytes += sum(store.norm_bytes for store in stores)
    dense_bytes = sum(store.key.nbytes + store.value.nbytes + store.lag_bytes for store in stores)
    index_bytes += _table_bytes(packed)
    total_bytes = codes_bytes + params_bytes + dense_bytes + index_bytes
    visual_bytes = sum(pair.codes_bytes + pair.params_bytes for pair in visual)
    if visual:
        visual_bytes += visual_index_bytes + _table_bytes(visual)
    elements = sum(tokens * _elements_per_token(store) for store, tokens, _ in layers)
    visual_elements = sum(tokens * _elements_per_token(store) for store, _, tokens in layers)
    element_bytes = stores[0].dtype.itemsize if stores else 0
    return MemoryReport(
        codes_bytes=codes_bytes,
        params_bytes=params_bytes,
        dense_bytes=dense_bytes,
        index_bytes=index_bytes,
        total_bytes=total_bytes,
        dense_equivalent_bytes=elements * element_bytes,
        bits_per_element=_bits(total_bytes, elements),
        visual_bytes=visual_bytes,
        visual_dense_equivalent_bytes=visual_elements * element_bytes,
        visual_bits_per_element=_bits(visual_bytes, visual_elements),
        nominal_bits=nominal_bits,
    )


def _pairs(stores: Iterable[Store], names: Sequence[str]) -> list[PackedPair]:
    found = [getattr(store, name) for name in names for store in stores]
    return [pair for pair in found if pair is not None]


def _bits(total_bytes: int, elements: int) -> float:
    return 8 * total_bytes / elements if elements else 0.0


def _rolls(state: LedgerState) -> tuple[Roll, ...]:
    return tuple(getattr(state, name) for name in (*STORES, "dense"))


def _tokens(state: LedgerState) -> Tensor:
    """Tokens of each sequence, [batch]; evicted ones count."""
    return torch.stack([*(roll.lengths for roll in _rolls(state)), state.evicted.tokens]).sum(0)


def _visual_tokens(state: LedgerState) -> int:
    packed = sum(int(getattr(state, name).lengths.sum()) for name in SPANS)
    return packed + int(state.evicted.visual.sum())


def _placed(places: StaticPlaces) -> int:
    lengths = (places.dense, places.stream, places.visual, places.background)
    return sum(int(x.sum()) for x in (*lengths, places.evicted.tokens))


def _placed_visual(places: StaticPlaces) -> int:
    return sum(int(x.sum()) for x in (places.visual, places.background, places.evicted.visual))


def _elements_per_token(store: Store) -> int:
    return store.key.shape[1] * (store.key.shape[-1] + store.value.shape[-1])


def _token_bytes(store: Store) -> int:
    return _elements_per_token(store) * store.dtype.itemsize


def _table_bytes(pairs: list[PackedPair]) -> int:
    """Bytes of block tables; layers share one object, which counts once."""
    tables = {id(t.blocks): t.blocks for pair in pairs for t in (pair.key, pair.value)}
    return sum(table.nbytes for table in tables.values())
