"""Streams in class records: every group of a tile is a span, with parameters of its own.

K and V have groups of 64 tokens. A group is one record of one tile, in the order of the tokens:

    data    | group 0 | group 1 | group 2 | room ...    [batch, kv_heads, groups, bytes]

Its scales, zero-points and order of channels lie outside, a row per group. So groups join others
by copying, and a buffer takes a group at its place while a step is captured.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.classes.format import ClassFormat, format_of
from duotone.attention.cuda.classes.layout import ClassRecords, class_layout
from duotone.attention.cuda.classes.pack import check, class_pack
from duotone.attention.cuda.dense.window_append import close_gap
from duotone.attention.cuda.groups.tiles import put
from duotone.attention.cuda.shared.filling import has_records
from duotone.attention.cuda.shared.slots import TILE
from duotone.attention.cuda.short.pack import short_pack
from duotone.attention.refused import reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.key_norm import divided
from duotone.cache.ledger import Piece
from duotone.cache.packing import pack_groups
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Lengths, Move
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import unchecked


@dataclass(frozen=True, kw_only=True)
class ClassStream(ClassRecords):
    """K and V of a stream, and room for more groups.

    tokens: offsets of the groups that hold tokens; all others are empty, at the end.
    """

    tokens: Int[Tensor, "batch edges"]

    @classmethod
    def of(cls, records: ClassRecords, groups: BlockTable) -> ClassStream:
        """Records of these groups, a tile each."""
        own = {f.name: getattr(records, f.name) for f in fields(ClassRecords)}
        first = _first(*groups.offsets[:, 1:].shape, groups.offsets.device)
        return cls(**own | {"first": first}, tokens=groups.offsets)

    def offsets(self, spans: BlockTable) -> Int[Tensor, "batch edges"]:
        """Offsets of the groups that hold tokens. spans: of the whole buffer."""
        return self.tokens

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors that `write` changes."""
        return list(self.tensors.values())

    def with_codes(self, which: Literal["key", "value"], source: Any) -> ClassStream:
        """Refuse: codes of unequal widths belong to one layer (`CacheSpec.check_depth`)."""
        raise ValueError(f"class records share no codes between layers; got {which} of another one")

    def append(self, other: ClassRecords, held: BlockTable, more: BlockTable) -> ClassStream | None:
        """More groups after ours: copies, whether our last group is whole or not."""
        if not isinstance(other, ClassStream) or other.format != self.format:
            return None
        groups, join = held.append(more)
        new = other.by_head
        joined = {
            name: join.apply(torch.cat([x, new[name]], 2)) for name, x in self.by_head.items()
        }
        first = _first(*groups.offsets[:, 1:].shape, groups.offsets.device)
        return replace(self, **joined, first=first, tokens=groups.offsets)

    def widened(self, tokens: int) -> ClassStream:
        """Records of these groups in buffers for `tokens` tokens."""
        count = -(-tokens // TILE)
        wide = {name: _widened(x, count) for name, x in self.by_head.items()}
        first = _first(len(self.first), count, self.first.device)
        edges = self.tokens[:, -1:].repeat(1, count + 1)
        kept = min(count + 1, self.tokens.shape[1])
        edges[:, :kept] = self.tokens[:, :kept]
        return replace(self, **wide, first=first, tokens=edges)

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
        key, value = (leaving.apply(x) for x in states)
        new = _one_group(divided(key, key_norm), value, spec)
        for name, kept in self.by_head.items():
            put(kept, getattr(new, name), where // TILE, full)
        edges = torch.arange(self.tokens.shape[1], device=where.device) * TILE
        end = where + full.long() * TILE
        self.tokens.copy_(torch.minimum(edges, end[:, None]))

    close_gap = staticmethod(close_gap)


class ClassLayout:
    """Layout of classes in a cache on CUDA (`cache.pair.StreamLayout`): of spans and of streams."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> ClassRecords | None:
        """The records of K and V that are packed already."""
        records = class_layout(key, value)
        if records is None or value.spec.group is None:
            return records
        return ClassStream.of(records, value.blocks)

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V; None where torch has to."""
        if not key.is_cuda or reason_against(check, spec, key, value):
            return None
        return stored(key, value, spec, piece)

    def empty(
        self, spec: KVSpec, shape: tuple[int, int], channels: tuple[int, int], device: torch.device
    ) -> ClassStream | None:
        """A stream without tokens. shape: (batch, kv_heads). channels: of K and of V."""
        if spec.value.group is None or reason_against(format_of, spec.key, spec.value, channels):
            return None
        group = _one_group(*(torch.zeros(*shape, TILE, n, device=device) for n in channels), spec)
        none = {name: x[:, :, :0].contiguous() for name, x in group.by_head.items()}
        edges = torch.zeros(shape[0], 1, dtype=torch.long, device=device)
        return replace(group, **none, first=_first(shape[0], 0, device), tokens=edges)

    def sharing(self, lends: Collection[str], borrows: Collection[str]) -> NoLayout:
        """Layout for a layer that shares codes: it has none."""
        return NoLayout()


class NoLayout:
    """Layout of no tokens (`cache.pair.StreamLayout`): canonical order everywhere."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> None:
        """No records."""

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> None:
        """Nothing is packed."""

    def empty(self, *given: Any) -> None:
        """No stream."""

    def sharing(self, lends: Collection[str], borrows: Collection[str]) -> NoLayout:
        """Itself."""
        return self


def stored(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
    """Quantize by kernels, into records where tokens fill these; None for streams that do not.

    Spans that fill no records are in canonical order. Torch would take some 2,000 launches a tensor
    to search their levels.
    """
    spans = piece.spans.split(spec.value.group)
    if has_records(ClassFormat.of(spec.key, spec.value, key.shape[3]), spans):
        return pack(key, value, spec, piece)
    if spec.value.group is not None or not spans.tokens:
        return None
    if spec.key.group is not None:
        return pack(key, value, spec, piece).canonical()
    return short_pack(key, value, spec, piece)


def pack(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """`class_pack` of spans, and of streams, whose spans are their groups."""
    if spec.value.group is None:
        return class_pack(key, value, spec, piece)
    groups = replace(piece, spans=piece.spans.split(spec.value.group))
    pair = class_pack(key, value, of_spans(spec), groups)
    left = (replace(x, spec=s) for x, s in ((pair.key, spec.key), (pair.value, spec.value)))
    return PackedPair(*left, ClassStream.of(pair.records, pair.value.blocks))


@lru_cache(maxsize=512)
def of_spans(spec: KVSpec) -> KVSpec:
    """Policy of spans that are a stream's groups."""
    return KVSpec(spec.key.replace(group=None), spec.value.replace(group=None))


def _one_group(key: Tensor, value: Tensor, spec: KVSpec) -> ClassStream:
    """One group of each sequence, by kernels or by torch; a second call can be captured."""
    piece = _whole_group(len(key), key.device)
    with unchecked():
        if key.is_cuda and reason_against(check, spec, key, value) is None:
            return pack(key, value, spec, piece).records
        both = (_canonical(x, s, piece.spans) for x, s in ((key, spec.key), (value, spec.value)))
        return ClassLayout()(*both)


def _canonical(x: Tensor, spec: TensorSpec, groups: BlockTable) -> PackedTensor:
    return PackedTensor(spec, x.shape[3], x.dtype, groups, **pack_groups(x, spec, decoding=True))


@lru_cache(maxsize=16)
def _whole_group(batch: int, device: torch.device) -> Piece:
    """The first group of every sequence: one object, since what follows from tables is kept."""
    lengths = torch.full((batch,), TILE, device=device)
    move = Move.consecutive(0, TILE, lengths)
    groups = BlockTable.uniform(batch, TILE, TILE, device)
    _ = groups.sizes  # made now: a captured step must find them
    return Piece(move, groups, move, decoding=True)


def _first(batch: int, groups: int, device: torch.device) -> Int[Tensor, "batch groups"]:
    """The record of each group."""
    return torch.arange(groups, dtype=torch.int32, device=device).repeat(batch, 1)


def _widened(x: Tensor, count: int) -> Tensor:
    """A buffer of `count` groups that begins with these, filled up with zeros."""
    wide = x.new_zeros(*x.shape[:2], count, x.shape[3])
    kept = min(count, x.shape[2])
    wide[:, :, :kept] = x[:, :, :kept]
    return wide
