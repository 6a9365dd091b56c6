"""Streams in group records: laid out, taken apart again, and with room for what joins them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor

from duotone.attention.cuda.dense.window_append import close_gap
from duotone.attention.cuda.groups.canonical import taken_apart
from duotone.attention.cuda.groups.format import APART_TILES, TILE, GroupFormat, format_of
from duotone.attention.cuda.groups.layout import apart_codes, scales_fit, to_group_records
from duotone.attention.cuda.groups.pack import fits, group_pack, packs
from duotone.attention.cuda.groups.tiles import (
    Tiles,
    filled,
    from_the_start,
    holds_whole_tiles,
    joined,
    put,
    widened,
)
from duotone.attention.refused import reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.key_norm import divided
from duotone.cache.ledger import Piece
from duotone.cache.packing import pack_groups
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Lengths, Move
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import unchecked

Both = tuple[PackedTensor, PackedTensor]


@dataclass(frozen=True)
class GroupRecords:
    """K and V of a stream with all their parameters.

    data: [batch, kv_heads, records, format.own_nbytes]; token t of a sequence is in tile t / 32.
    key_codes, value_codes: separate ones, [batch, kv_heads, tiles, bytes], in a multiple of
        `APART_TILES`; None where `data` has them, and where another layer keeps them (`with_codes`
        brings them in).
    """

    format: GroupFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]
    key_codes: Tiles | None = None
    value_codes: Tiles | None = None

    @classmethod
    def of(cls, key: PackedTensor, value: PackedTensor, form: GroupFormat) -> GroupRecords:
        """The records of a stream; separate codes that key or value lack are left out."""
        return cls(
            form,
            to_group_records(key, value, form),
            apart_codes(key, form.key, form.channels, value=False),
            apart_codes(value, form.value, form.channels, value=True),
        )

    @property
    def shape(self) -> torch.Size:
        """(batch, kv_heads)."""
        return self.data.shape[:2]

    @property
    def buffers(self) -> list[Tensor]:
        """All that is stored."""
        return [x for x in (self.data, *self.codes) if x is not None]

    @property
    def by_head(self) -> dict[str, Tensor]:
        """`buffers` by the names of their fields."""
        held = {"data": self.data, "key_codes": self.key_codes, "value_codes": self.value_codes}
        return {name: x for name, x in held.items() if x is not None}

    @property
    def codes(self) -> tuple[Tiles | None, Tiles | None]:
        """Codes of K and of V that are stored separately."""
        return self.key_codes, self.value_codes

    @property
    def nbytes(self) -> int:
        """Bytes, filling included."""
        return sum(x.nbytes for x in self.buffers)

    @property
    def params_bytes(self) -> int:
        """Bytes of scales, zero-points and signs."""
        return self.data.nbytes // self.format.own_tile_bytes * sum(self.format.part_bytes[2:])

    @property
    def tiles(self) -> Tiles:
        """Contents of the records, tile by tile: a view."""
        return self.data.view(*self.shape, -1, self.format.own_tile_bytes)

    def with_codes(self, which: Literal["key", "value"], source: GroupRecords) -> GroupRecords:
        """Records with codes that another layer keeps; nothing is copied."""
        codes = f"{which}_codes"
        return replace(self, **{codes: getattr(source, codes)})

    def rows(self, index: Tensor) -> GroupRecords:
        """Pick sequences."""
        codes = (None if x is None else x[index] for x in self.codes)
        return GroupRecords(self.format, self.data[index], *codes)

    def left(self, key: PackedTensor, value: PackedTensor) -> Both:
        """Their block tables."""
        return key.without_parts(), value.without_parts()

    def canonical(self, key: PackedTensor, value: PackedTensor) -> Both:
        """K and V in canonical order."""
        form = self.format
        k_codes, v_codes, *params = self.tiles.split(form.own_part_bytes, -1)
        k_codes = self.key_codes if form.key.apart else k_codes
        v_codes = self.value_codes if form.value.apart else v_codes
        return (
            taken_apart(key, form.key, form.channels, k_codes, params[0], value=False),
            taken_apart(value, form.value, form.channels, v_codes, params[1], value=True),
        )

    def append(
        self, other: GroupRecords, held: BlockTable, more: BlockTable
    ) -> GroupRecords | None:
        """More tiles after whole ones: copies. None after a tile that is not full."""
        if self.format != other.format or not holds_whole_tiles(held):
            return None
        pairs = zip(self._all_tiles, other._all_tiles, strict=True)
        return self._of_tiles(
            *(old if old is None else joined(old, new, held, more) for old, new in pairs)
        )

    def widened(self, tokens: int) -> GroupRecords:
        """Records of these tokens in buffers for `tokens`."""
        count = -(-tokens // TILE)
        return self._of_tiles(*(x if x is None else widened(x, count) for x in self._all_tiles))

    def write(
        self,
        states: tuple[Tensor, Tensor],
        leaving: Move,
        full: Tensor,
        where: Lengths,
        key_norm: Tensor | None,
        spec: KVSpec,
    ) -> None:
        """Quantize a group of dense K and V of the sequences that are `full`, from token `where`.

        leaving: which tokens of `states` they are. Shapes are fixed and nothing asks the host.
        """
        count = leaving.tokens // TILE
        if packs(states, self.format, spec):
            tiles, first = full.long() * count, where // TILE
            given = (leaving.index, tiles, first, self.format, spec, self.data, key_norm)
            group_pack(*states, *given, codes=self.codes, decoding=True)
            return
        key, value = (leaving.apply(x) for x in states)
        packed = self._packed(divided(key, key_norm), value, spec)
        new = GroupRecords.of(*packed, self.format)
        for kept, tiles in zip(self._all_tiles, new._all_tiles, strict=True):
            if kept is not None:
                put(kept, tiles[:, :, :count], where // TILE, full)

    close_gap = staticmethod(close_gap)

    def _packed(self, key: Tensor, value: Tensor, spec: KVSpec) -> Iterator[PackedTensor]:
        """Groups in canonical order, without the codes that another layer keeps."""
        form = self.format
        yield _group(key, spec.key, lent=form.key.apart and self.key_codes is None)
        yield _group(value, spec.value, lent=form.value.apart and self.value_codes is None)

    @property
    def _all_tiles(self) -> tuple[Tiles, Tiles | None, Tiles | None]:
        return self.tiles, *self.codes

    def _of_tiles(self, own: Tiles, *apart: Tiles | None) -> GroupRecords:
        """Whole records of some tiles."""
        per_record = self.format.tiles
        data = filled(own, per_record).unflatten(2, (-1, per_record)).flatten(3)
        codes = (None if x is None else filled(x, APART_TILES) for x in apart)
        return GroupRecords(self.format, data, *codes)


@dataclass(frozen=True)
class GroupLayout:
    """Lays streams out in group records.

    lends: of "key" and "value", those whose codes other layers read. borrows: those whose codes
    another layer keeps. The codes of both are separate; borrowed ones are not stored.
    """

    lends: frozenset[str] = frozenset()
    borrows: frozenset[str] = frozenset()

    def sharing(self, lends: Collection[str], borrows: Collection[str]) -> GroupLayout:
        """Layout for a layer that shares codes."""
        return GroupLayout(frozenset(lends), frozenset(borrows))

    def __call__(self, key: PackedTensor, value: PackedTensor) -> GroupRecords | None:
        """The records of K and V, or None where the kernel cannot read them."""
        form = self._format_of((key.spec, value.spec), (key.head_dim, value.head_dim))
        both = (key, value)
        if form is None or not all(x.per_token or x.blocks.is_whole(x.spec.group) for x in both):
            return None
        operands = (form.key, form.value)
        if not all(scales_fit(x, at) for x, at in zip(both, operands, strict=True)):
            return None
        return GroupRecords.of(key, value, form)

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V straight into records; None where no kernel does that."""
        form = self._format_of((spec.key, spec.value), (key.shape[3], value.shape[3]))
        if form is None or not packs((key, value), form, spec):
            return None
        multiple = max(TILE, spec.flush_tokens)
        take, lengths = piece.take, piece.take.lengths
        if take.tokens % multiple or not take.holds_groups_of(multiple):
            return None
        tiles, where = from_the_start(take)
        overflow = lengths.new_zeros(1, dtype=torch.int32)
        records = self._zeros(form, (len(lengths), key.shape[1]), take.tokens, key.device)
        group_pack(
            key,
            value,
            take.index,
            tiles,
            where,
            form,
            spec,
            records.data,
            codes=records.codes,
            overflow=overflow,
            decoding=piece.decoding,
        )
        if not fits(overflow, form):
            return None
        tensors = (_bare(x, s, piece.spans) for x, s in ((key, spec.key), (value, spec.value)))
        return PackedPair(*tensors, records)

    def empty(
        self, spec: KVSpec, shape: tuple[int, int], channels: tuple[int, int], device: torch.device
    ) -> GroupRecords | None:
        """A stream without tokens. shape: (batch, kv_heads). channels: of K and of V."""
        form = self._format_of((spec.key, spec.value), channels)
        return None if form is None else self._zeros(form, shape, 0, device)

    def _format_of(
        self, specs: tuple[TensorSpec, TensorSpec], channels: tuple[int, int]
    ) -> GroupFormat | None:
        given = (*specs, channels, self.lends | self.borrows)
        return None if reason_against(format_of, *given) else format_of(*given)

    def _zeros(
        self, form: GroupFormat, shape: tuple[int, int], tokens: int, device: torch.device
    ) -> GroupRecords:
        """Records for `tokens` tokens of each sequence, and the codes that are lent with them."""
        bytes_like = torch.empty(0, dtype=torch.uint8, device=device)
        tiles = -(-tokens // TILE)
        apart = -(-tiles // APART_TILES) * APART_TILES
        codes = {
            f"{which}_codes": bytes_like.new_zeros(*shape, apart, nbytes)
            for which, nbytes in zip(("key", "value"), form.part_bytes, strict=False)
            if which in self.lends
        }
        records = -(-tiles // form.tiles)
        data = bytes_like.new_zeros(*shape, records, form.own_nbytes)
        return GroupRecords(form, data, **codes)


def _bare(x: Tensor, spec: TensorSpec, spans: BlockTable) -> PackedTensor:
    """A packed tensor whose parts are in records."""
    return PackedTensor(spec, x.shape[3], x.dtype, spans.split(spec.row_tokens), None, None)


def _group(x: Tensor, spec: TensorSpec, lent: bool) -> PackedTensor:
    """Whole groups of all sequences, packed in canonical order. lent: without codes."""
    with unchecked():
        parts = pack_groups(x, spec, decoding=True)
    table = BlockTable.uniform(x.shape[0], x.shape[2], spec.row_tokens, x.device)
    packed = PackedTensor(spec, x.shape[3], x.dtype, table, **{"codes": None, **parts})
    return packed.without_codes() if lent else packed
