"""Prefilled layer with fixed buffers: a decode step changes numbers on the device, no shapes.

A `LayerStore` grows and needs the lengths of sequences on the host. Here everything that decoding
can need is allocated at once, and lengths are tensors (`cache.places`). Every step has the same
launches, so it can be captured in a CUDA graph or compiled. Packed visual spans stay as they are.
New tokens go to the dense store, after the tokens that never leave it. Groups leave the window on
the ledger's schedule. Rows that are not full write back their own content: rows of different
lengths share one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.key_norm import divided
from duotone.cache.layer import LayerStore
from duotone.cache.packed import PackedTensor
from duotone.cache.packing import pack_groups
from duotone.cache.pair import Growing, PackedPair
from duotone.cache.places import StaticPlaces
from duotone.cache.ragged import Move
from duotone.cache.segments import DenseSegment, PackedSegment, Segment
from duotone.quant import TensorSpec
from duotone.quant.autocast import without_autocast
from duotone.quant.checks import unchecked


class StaticStore:
    """K and V of one layer in fixed buffers.

    store: a prefilled layer, whose packed visual spans are taken over, not copied. places: shared
    by all layers of its ledger. order: from `StaticPlaces.of`. indices: of sequences and kv heads,
    for `write`.
    Errors: ValueError for averaged codes, and for streams that do not consist of whole groups.
    """

    def __init__(self, store: LayerStore, places: StaticPlaces, order: Move) -> None:
        check_frozen(store)
        self.spec, self.places, self.key_norm = store.spec, places, store.key_norm
        self.dtype = store.dtype
        self.key = _widened(order.apply(store.key), places.dense_tokens)
        self.value = _widened(order.apply(store.value), places.dense_tokens)
        self.visual, self.background = store.visual, store.background
        self.stream: PackedPair | None = None
        self.sources: dict[str, StaticStore] = {}
        if places.stream_tokens:
            heads = (self.key.shape[1], self.key.shape[-1], self.value.shape[-1])
            with without_autocast(self.key.device):
                self.stream = _static_stream(store, places, heads, frozenset(store.sources))
        rows = torch.arange(self.key.shape[0], device=self.key.device)
        self.indices = (rows[:, None], torch.arange(self.key.shape[1], device=rows.device)[None])
        self.segments = self._segments()

    def share(self, sources: dict[str, StaticStore]) -> None:
        """Read the codes that other layers keep, by "key" and "value".

        Errors: ValueError where a layer's stream is in a kernel's order and its source's is not.
        """
        self.sources = sources
        for source in sources.values():
            _check_order(self.stream, source.stream)
        self.segments = self._segments()

    def _segments(self) -> list[Segment]:
        """Segments that attention reads; objects, and addresses of their lengths, never change."""
        found: list[Segment] = []
        for name in ("visual", "background"):
            pair, lengths = self._complete(name), getattr(self.places, name)
            if pair is not None and pair.key.tokens:
                segment = PackedSegment(pair.key, pair.value, lengths, True, records=pair.records)
                found.append(segment)
        stream = self._complete("stream")
        if stream is not None:
            segment = PackedSegment(
                stream.key,
                stream.value,
                self.places.stream,
                key_norm=self.key_norm,
                records=stream.records,
            )
            found.append(segment)
        return [*found, DenseSegment(self.key, self.value, self.places.dense)]

    def _complete(self, name: str) -> PackedPair | None:
        """Pair of a store with the codes that other layers keep for it."""
        pair = getattr(self, name)
        for which, source in self.sources.items():
            pair = None if pair is None else pair.with_codes(which, getattr(source, name))
        return pair

    @property
    def norm_bytes(self) -> int:
        """Bytes of the key normalisation."""
        return 0 if self.key_norm is None else self.key_norm.nbytes

    # Layers with exact V of packed tokens are never frozen (`check_frozen`).
    lag_bytes = 0

    @property
    def index_bytes(self) -> int:
        """Bytes of the indices that `write` uses in addition to `places`."""
        return sum(index.nbytes for index in self.indices)

    def write(self, key: Tensor, value: Tensor) -> None:
        """Enter the current step's K and V, [batch, kv_heads, 1, channels], at `places.at`."""
        index = (*self.indices, self.places.at[:, None])
        for states, new in ((self.key, key), (self.value, value)):
            states.index_put_(index, new[:, :, 0].to(states.dtype))

    def flush(self, full: Bool[Tensor, " batch"]) -> None:
        """Quantize the oldest group of the rows that are `full`, and close the gap."""
        if self.stream is None:
            return
        places = self.places
        source, target = places.staged()
        oldest = Move(places.leaving(), places.dense)
        if self.stream.records is not None:
            states, records = (self.key, self.value), self.stream.records
            text = self.spec.text
            records.write(states, oldest, full, places.stream, self.key_norm, text)
            records.close_gap(states, source, target, full)
            return
        self._pack_oldest(oldest, full)
        for store in (self.key, self.value):
            move_tokens(store, source, target, full)

    def _pack_oldest(self, oldest: Move, full: Tensor) -> None:
        key, value = (oldest.apply(x) for x in (self.key, self.value))
        for which, x in (("key", divided(key, self.key_norm)), ("value", value)):
            self._pack(which, x, full)

    def _pack(self, which: str, x: Tensor, full: Tensor) -> None:
        tensor: PackedTensor = getattr(self.stream, which)
        with unchecked():
            parts = pack_groups(x, tensor.spec, decoding=True)
        places, width = self.places, self.places.group
        for name, part in parts.items():
            kept = getattr(tensor, name)
            if kept is None:  # another layer keeps the codes
                continue
            tokens_per_row = width // part.shape[2]
            # A full sequence that finds no room must fail on the device, not overwrite.
            room = places.stream.clamp_max(places.stream_tokens - width)
            first = torch.where(full, places.stream, room) // tokens_per_row
            rows = first[:, None] + torch.arange(part.shape[2], device=first.device)
            _write_rows(kept, rows, part, full)


def flush_all(stores: Sequence[StaticStore]) -> None:
    """Flush all layers at sequences with full staged slots; fixed shapes, no wait for the host."""
    distinct = {id(store.places): store.places for store in stores}
    full = {key: places.full() for key, places in distinct.items()}
    for store in stores:
        store.flush(full[id(store.places)])
    for key, places in distinct.items():
        if places.group:
            places.turn(full[key])


def move_tokens(store: Tensor, source: Tensor, target: Tensor, full: Tensor) -> None:
    """Set store[b, :, target[b]] = store[b, :, source[b]] where full[b]; both: [batch, n]."""
    _write_rows(store, target, Move(source, full.long()).apply(store), full)


def _write_rows(store: Tensor, rows: Tensor, new: Tensor, full: Tensor) -> None:
    """Set store[b, :, rows[b]] = new[b] where full[b]; other sequences keep their content."""
    index = rows.view(rows.shape[0], 1, -1, *([1] * (new.dim() - 3))).expand(new.shape)
    chosen = full.view(-1, *([1] * (new.dim() - 1)))
    store.scatter_(2, index, torch.where(chosen, new.to(store.dtype), store.gather(2, index)))


def _widened(x: Tensor, tokens: int) -> Tensor:
    """Copy x into a buffer of `tokens` tokens."""
    wide = x.new_zeros(*x.shape[:2], tokens, *x.shape[3:])
    kept = min(tokens, x.shape[2])
    wide[:, :, :kept] = x[:, :, :kept]
    return wide


def check_frozen(store: LayerStore) -> None:
    """Raise ValueError for averaged codes, and for a stream with a group that is not whole."""
    if store.runs:
        raise ValueError(
            "codes that layers average need all layers at once; got a scheme with "
            "Sharing.weights. Decode in buffers that grow."
        )
    if any(tensor.lag for tensor in store.spec.tensors):
        raise ValueError(f"{LAG} Decode in buffers that grow.")
    for tensor in () if store.stream is None else (store.stream.key, store.stream.value):
        size = tensor.spec.row_tokens
        if size is not None and not tensor.blocks.is_whole(size):
            raise ValueError(
                "a stream that is frozen must consist of whole groups; this one was cropped inside "
                "a group and went on. Prefill again."
            )


def settle_orders(stores: Iterable[LayerStore]) -> None:
    """Give up a kernel's order where a layer shares codes with one whose stream cannot have it.

    For streams that are empty yet: those with tokens have one order already.
    """
    for store in stores:
        if not store.shares or store.stream is not None:
            continue
        channels = (store.key.shape[-1], store.value.shape[-1])
        if _empty_records(store, store.key.shape[:2], channels, store.key.device) is None:
            store.canonical.add("stream")


def _empty_records(
    store: LayerStore, shape: tuple[int, int], channels: tuple[int, int], device: torch.device
) -> Growing | None:
    """Make a stream without tokens in a kernel's order; None: canonical order."""
    layout = store.layout_of("stream")
    return None if layout is None else layout.empty(store.spec.text, shape, channels, device)


LAG = "fixed buffers keep no exact V of packed tokens; got TensorSpec.lag."
UNLIKE = (
    "layers that share codes must have them in one order; the kernels lay out the stream "
    "of one of them only. Decode in buffers that grow, or with impl='triton'."
)


def _check_order(own: PackedPair | None, source: PackedPair | None) -> None:
    orders = {None if pair is None else pair.records is None for pair in (own, source)}
    if len(orders) > 1:
        raise ValueError(UNLIKE)


def _static_stream(
    store: LayerStore, places: StaticPlaces, heads: tuple[int, int, int], lent: frozenset[str]
) -> PackedPair:
    """Make a stream with room for all later groups; it starts with the stored groups."""
    batch = len(places.dense)
    records = _static_records(store, (batch, heads[0]), heads[1:], places)
    if records is not None:
        tables = _bare(store, places, heads[1:])
        return PackedPair(*tables, records.widened(places.stream_tokens))
    made = {}
    for which, channels in zip(("key", "value"), heads[1:], strict=True):
        spec: TensorSpec = getattr(store.spec.text, which)
        old = None if store.stream is None else getattr(store.stream.canonical(), which)
        size = (batch, heads[0], places.group, channels)
        sample = torch.zeros(size, dtype=store.dtype, device=store.key.device)
        parts = pack_groups(sample, spec, decoding=True)
        grown = {}
        for name, part in parts.items():
            if name == "codes" and which in lent:
                continue
            rows = places.stream_tokens * part.shape[2] // places.group
            before = part[:, :, :0] if old is None else getattr(old, name)
            grown[name] = _widened(before, rows)
        table = _uniform_blocks(batch, places.stream_tokens, spec, places.dense.device)
        fields = {"spec": spec, "head_dim": channels, "dtype": store.dtype, "blocks": table}
        made[which] = PackedTensor(**fields, **{"codes": None, **grown})
    return PackedPair(**made)


def _static_records(
    store: LayerStore, shape: tuple[int, int], channels: tuple[int, int], places: StaticPlaces
) -> Growing | None:
    """Make the stream in a kernel's order, where that order can grow by whole groups."""
    if store.stream is not None and store.layout_of("stream") is not None:
        return store.stream.records
    return _empty_records(store, shape, channels, places.dense.device)


def _bare(
    store: LayerStore, places: StaticPlaces, channels: tuple[int, int]
) -> Iterator[PackedTensor]:
    """K and V without tensors, over the whole buffer."""
    for which, width in zip(("key", "value"), channels, strict=True):
        spec: TensorSpec = getattr(store.spec.text, which)
        table = _uniform_blocks(len(places.dense), places.stream_tokens, spec, places.dense.device)
        yield PackedTensor(spec, width, store.dtype, table, None, None)


def _uniform_blocks(batch: int, tokens: int, spec: TensorSpec, device: torch.device) -> BlockTable:
    """Make blocks of equal size over the whole buffer, with or without tokens."""
    table = BlockTable.uniform(batch, tokens, spec.row_tokens, device)
    # Sizes wait for the device, so they are made now: a captured step must find them.
    _ = table.sizes
    return table
