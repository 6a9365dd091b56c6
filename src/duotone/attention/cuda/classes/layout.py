"""Records of K and V with channels of unequal bits, for `classes/decode.cu`.

K's classes of channels are chosen per block of tokens or per span, V's per span. A record holds
tiles of 64 tokens; where K has groups, each with all that K needs, so that no tile needs
another's parameters:

    | codes of K | codes of V | zero-points of K | scales of K | channels of K |     64 tokens
                                                                 and exponents, in 8 bits

and where it has none, with codes alone:

    | codes of K | codes of V |                                                     64 tokens

Codes are sorted by class and every class is filled up to columns of 16 channels; a class lies in
consecutive words of a lane, [vectors][32 lanes][words], each as `layout` draws the registers of
its columns. Where 8 channels or fewer are left over in a class of 4 or 2 bits, they are a half
column, in half the words (`classes.codes`). The zero-points of all channels are in the order of the
channels; scales and channel numbers (a byte each) in the order of the coded places, those filled up
being 0 and those of half columns there twice. Scales and
zero-points are fp16, or have 8 bits and an exponent each, and then those are middles of levels
(`quant.small_floats`). Codes of one width, of K or of V, are one
class of all channels.

Where K and V both have groups of a tile, as a stream has them, each group is a span
(`classes.stream`).

What belongs to whole spans stays outside: scales, zero-points and order of V, and of K without
groups; with groups, the largest scale that K has in each channel, which bounds the integers that q
becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from duotone.attention.cuda.classes.codes import class_codes, from_class_codes
from duotone.attention.cuda.classes.format import ClassFormat, format_of
from duotone.attention.cuda.classes.params import (
    channel_order,
    from_span_parameters,
    from_tile_parameters,
    largest_scales,
    packed_codes,
    span_parameters,
    tile_parameters,
)
from duotone.attention.cuda.shared.filling import fitted, has_records
from duotone.attention.cuda.shared.slots import (
    TILE,
    joined,
    joined_records,
    record_slots,
    slot_of_token,
)
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.attention.refused import reason_against
from duotone.cache import BlockTable, PackedTensor

# In 8 bits with one column more.
SpanScale = Shaped[Tensor, "batch kv_heads spans _coded"]
SpanZero = Shaped[Tensor, "batch kv_heads spans _head_dim"]
SpanOrder = UInt8[Tensor, "batch kv_heads spans head_dim"]
# Tensors that all heads of a sequence have together, `tokens` in streams.
BY_SEQUENCE = ("first", "tokens")


@dataclass(frozen=True)
class ClassRecords:
    """K and V of the same tokens, parameters included.

    data: [batch, kv_heads, records, format.nbytes]. first: where each span's records start.
    scale, zero: of K and of V, sorted by class; order: the channel of each of them. K's are None
    where its parameters lie in the tiles; then there is
    key_top: the largest scale of each channel in the tiles of a span, in the order of channels.
    """

    format: ClassFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]
    first: Int[Tensor, "batch spans"]
    value_scale: SpanScale
    value_zero: SpanZero
    value_order: SpanOrder
    key_top: Float[Tensor, "batch kv_heads spans head_dim"] | None = None
    key_scale: SpanScale | None = None
    key_zero: SpanZero | None = None
    key_order: SpanOrder | None = None

    @property
    def shape(self) -> torch.Size:
        """(batch, kv_heads)."""
        return self.data.shape[:2]

    @property
    def params_bytes(self) -> int:
        """All but the codes and where spans start."""
        tiles = self.data[..., 0].numel() * self.format.tiles
        codes = tiles * sum(self.format.parts[:2])
        return self.nbytes - codes - self.first.nbytes

    def offsets(self, spans: BlockTable) -> Int[Tensor, "batch edges"]:
        """Offsets of the spans' tokens. spans: their table."""
        return spans.offsets

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that it has, by the names of their fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    @property
    def by_head(self) -> dict[str, Tensor]:
        """Tensors [batch, kv_heads, ...]."""
        return {name: x for name, x in self.tensors.items() if name not in BY_SEQUENCE}

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(x.nbytes for x in self.tensors.values())

    def rows(self, index: Int[Tensor, " rows"]) -> ClassRecords:
        """Pick sequences."""
        return replace(self, **{name: x[index] for name, x in self.tensors.items()})

    def canonical(
        self, key: PackedTensor, value: PackedTensor
    ) -> tuple[PackedTensor, PackedTensor]:
        """Both with codes and parameters of their own, exactly as they were packed."""
        return from_class_records(self, key, value)

    def left(self, key: PackedTensor, value: PackedTensor) -> tuple[PackedTensor, PackedTensor]:
        """No tensor at all."""
        return key.without_parts(), value.without_parts()

    def append(
        self, other: ClassRecords, held: BlockTable, more: BlockTable
    ) -> ClassRecords | None:
        """Records of more spans after ours, by copying; None where theirs have another size.

        Nor are they joined where K has groups, whose table is not that of spans.
        """
        if other.format != self.format or self.format.key_in_tiles:
            return None
        join, first = joined_records(held, more, self.format.tokens, self.data.shape[2])
        rows, new = held.append(more)[1], other.tensors
        moves = dict.fromkeys(self.tensors, rows) | {"data": join}
        del moves["first"]
        parts = {n: joined(move, self.tensors[n], new[n]) for n, move in moves.items()}
        return replace(self, **parts, first=first)


def class_layout(key: PackedTensor, value: PackedTensor) -> ClassRecords | None:
    """The records of K and V whose channels have unequal bits; None for other formats."""
    given, spans = (key.spec, value.spec, (key.head_dim, value.head_dim)), value.blocks
    if reason_against(format_of, *given) or not has_records(format_of(*given), spans):
        return None
    together = key.blocks.same_as(spans) or (key.spec.group and _is_within(key.blocks, spans))
    if not together:
        return None
    return to_class_records(key, value)


def to_class_records(key: PackedTensor, value: PackedTensor) -> ClassRecords:
    """Lay out packed K and V; what is filled up, tokens and channels, is 0."""
    spans = value.blocks
    form = fitted(ClassFormat.of(key.spec, value.spec, key.head_dim), spans)
    token, first = record_slots(spans, form.tokens)
    parts = [
        class_codes(key.unpacked(), token, form.key, value=False),
        class_codes(value.unpacked(), token, form.value, value=True),
    ]
    params = span_parameters(value, "value")
    if form.key_in_tiles:
        parts += tile_parameters(key, token, form)
        order = channel_order(key)
        params["key_top"] = largest_scales(key.full_scale, order, key.blocks, spans)
    else:
        params |= span_parameters(key, "key")
    data = torch.cat(parts, -1).unflatten(2, (-1, form.tiles)).flatten(3)
    return ClassRecords(form, data, first, **params)


def from_class_records(
    records: ClassRecords, key: PackedTensor, value: PackedTensor
) -> tuple[PackedTensor, PackedTensor]:
    """Exact inverse of `to_class_records`; where no token is, codes and parameters are anything.

    key, value: what of the tensors is not in the records, blocks above all.
    """
    form = records.format
    token, _ = record_slots(value.blocks, form.tokens)
    slot = slot_of_token(token, value.blocks.tokens)
    tiles = records.data.unflatten(-1, (form.tiles, -1)).flatten(2, 3)
    k_codes, v_codes, *in_tiles = tiles.split(form.parts, -1)
    codes = [
        from_class_codes(k_codes, slot, form, value=False),
        from_class_codes(v_codes, slot, form, value=True),
    ]
    params = [
        _key_parameters(records, key, slot, in_tiles),
        from_span_parameters(
            (records.value_scale, records.value_zero, records.value_order), value.spec, form.value
        ),
    ]
    one, other = (
        replace(x, codes=packed_codes(own, x.spec), **parts)
        for x, own, parts in zip((key, value), codes, params, strict=True)
    )
    return one, other


def _key_parameters(
    records: ClassRecords, key: PackedTensor, slot: Tensor, in_tiles: list[Tensor]
) -> dict[str, Tensor]:
    """K's, from the first tile of every group, or as they are."""
    if not in_tiles:
        outside = (records.key_scale, records.key_zero, records.key_order)
        return from_span_parameters(outside, key.spec, records.format.key)
    first = key.blocks.offsets[:, :-1].clamp_max(max(key.blocks.tokens - 1, 0))
    return from_tile_parameters(in_tiles, slot.gather(1, first) // TILE, key.spec, records.format)


@once_per_table
def _is_within(groups: BlockTable, spans: BlockTable) -> bool:
    """No tile of a span, 64 tokens from its start on, reaches over two groups."""
    token, _ = record_slots(spans, TILE)
    if not token.shape[1]:
        return True
    group = groups.block_of_token(spans.tokens).gather(1, token.clamp_min(0))
    first = group.unflatten(1, (-1, TILE))[:, :, :1].expand(-1, -1, TILE).flatten(1)
    return bool(((group == first) | (token < 0)).all())
