"""Records of K and V with channels of unequal bits, for `class_decode.cu`.

K's classes of channels are chosen per block of tokens, V's per span. A record holds tiles of 64
tokens, each with all that K needs, so that no tile asks for another's parameters:

    | codes of K | codes of V | zero-points of K | scales of K | channels of K |     64 tokens

Codes are sorted by class and every class is filled up to columns of 16 channels; a class lies in
consecutive words of a lane, [vectors][32 lanes][words], each as `layout` draws the registers of
its columns. The zero-points of all channels (fp16) are in the order of the channels; scales (fp16)
and channel numbers (a byte each) in the order of the coded places, those filled up being 0.

What belongs to whole spans stays outside: V's scales, zero-points and order, and the largest scale
that K has in each channel, which bounds the integers that q becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.class_format import COLUMN, WIDTHS, Classes, ClassFormat
from duotone.attention.cuda.layout import (
    MIN_BLOCK_TOKENS,
    TILE,
    key_order,
    record_slots,
    slot_of_token,
    take_tokens,
    tile_codes,
    untile_codes,
    value_order,
    words_per_vector,
)
from duotone.cache import BlockTable, PackedTensor
from duotone.quant import TensorSpec, pack
from duotone.quant.classes import CLASS_BITS, class_order, pack_classes


@dataclass(frozen=True)
class ClassRecords:
    """K and V of the same tokens, parameters included.

    data: [batch, kv_heads, records, format.nbytes]. first: where each span's records start.
    key_top: the largest scale of each channel in the tiles of a span, in the order of channels.
    value_scale, value_zero: sorted by class; value_order: the channel of each of them.
    """

    format: ClassFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]
    first: Int[Tensor, "batch spans"]
    key_top: Float[Tensor, "batch kv_heads spans head_dim"]
    value_scale: Float[Tensor, "batch kv_heads spans coded"]
    value_zero: Float[Tensor, "batch kv_heads spans head_dim"]
    value_order: UInt8[Tensor, "batch kv_heads spans head_dim"]

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

    @property
    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(x.nbytes for x in self._tensors.values())

    def rows(self, index: Int[Tensor, " rows"]) -> ClassRecords:
        """Pick sequences."""
        return replace(self, **{name: x[index] for name, x in self._tensors.items()})

    def canonical(
        self, key: PackedTensor, value: PackedTensor
    ) -> tuple[PackedTensor, PackedTensor]:
        """Both with codes and parameters of their own, exactly as they were packed."""
        return from_class_records(self, key, value)

    def left(self, key: PackedTensor, value: PackedTensor) -> tuple[PackedTensor, PackedTensor]:
        """No tensor at all."""
        return key.without_parts(), value.without_parts()

    def append(self, other: ClassRecords, lengths: Tensor, more: Tensor) -> None:
        """Spans would start new records: not by copying."""
        return


def class_layout(key: PackedTensor, value: PackedTensor) -> ClassRecords | None:
    """The records of K and V whose channels have unequal bits; None for other formats."""
    if spec_reason(key.spec, value.spec) or key.head_dim != value.head_dim:
        return None
    spans = value.blocks
    short = int(spans.lengths.max()) < MIN_BLOCK_TOKENS * spans.blocks
    if key.head_dim > 256 or short or not _is_within(key.blocks, spans):
        return None
    return to_class_records(key, value)


def spec_reason(key: TensorSpec, value: TensorSpec) -> str | None:
    """Why codes of these specs have no class records, or None."""
    for name, spec in (("key", key), ("value", value)):
        if spec.classes is None or spec.param_dtype != "float16":
            return f"class records hold classes of channels, float16 scales; {name} is {spec}"
        if any(bits not in WIDTHS for bits, _ in spec.classes):
            return f"class records have {WIDTHS} bits; {name} is {spec}"
    if key.group is None or key.group % TILE or value.group is not None:
        return (
            f"class records need groups of a multiple of {TILE} tokens in K and none in V; "
            f"got {key.group} and {value.group}"
        )
    return None


def to_class_records(key: PackedTensor, value: PackedTensor) -> ClassRecords:
    """Lay out packed K and V; what is filled up, tokens and channels, is 0."""
    form = ClassFormat(
        key.head_dim, Classes.of(key.spec, key.head_dim), Classes.of(value.spec, key.head_dim)
    )
    spans = value.blocks
    token, first = record_slots(spans, form.tokens)
    parts = [
        _class_codes(key.unpacked(), token, form.key, value=False),
        _class_codes(value.unpacked(), token, form.value, value=True),
        *_key_parameters(key, token, form),
    ]
    data = torch.cat(parts, -1).unflatten(2, (-1, form.tiles)).flatten(3)
    return ClassRecords(
        form,
        data,
        first,
        _largest_scales(key, spans),
        value.scale,
        value.zero_point,
        value.channel_order.to(torch.uint8),
    )


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
    k_codes, v_codes, zero, scale, channel = tiles.split(form.parts, -1)
    codes = {
        "key": _from_class_codes(k_codes, slot, form, value=False),
        "value": _from_class_codes(v_codes, slot, form, value=True),
    }
    first = key.blocks.offsets[:, :-1].clamp_max(max(key.blocks.tokens - 1, 0))
    tile = slot.gather(1, first) // TILE
    numbers = _class_numbers(records.value_order.long(), form.value, form.head_dim)
    return (
        replace(
            key,
            codes=pack_classes(codes["key"], key.spec),
            **_from_key_parameters(zero, scale, channel, tile, form),
        ),
        replace(
            value,
            codes=pack_classes(codes["value"], value.spec),
            scale=records.value_scale,
            zero_point=records.value_zero,
            classes=pack(numbers, CLASS_BITS),
        ),
    )


def _is_within(groups: BlockTable, spans: BlockTable) -> bool:
    """No tile of a span, 64 tokens from its start on, reaches over two groups."""
    token, _ = record_slots(spans, TILE)
    if not token.shape[1]:
        return True
    group = groups.block_of_token(spans.tokens).gather(1, token.clamp_min(0))
    first = group.unflatten(1, (-1, TILE))[:, :, :1].expand(-1, -1, TILE).flatten(1)
    return bool(((group == first) | (token < 0)).all())


def _class_codes(codes: Tensor, token: Tensor, classes: Classes, value: bool) -> Tensor:
    """Bytes of the codes of every tile, [batch, heads, tiles, bytes]; codes: sorted by class."""
    taken, start, words = take_tokens(codes, token, codes.shape[3]), 0, []
    order = value_order if value else key_order
    for (bits, n), columns in zip(classes.sizes, classes.columns, strict=True):
        filled = torch.nn.functional.pad(taken[..., start : start + n], (0, columns * COLUMN - n))
        tiles = tile_codes(filled, order(columns * COLUMN, bits, 1), bits, TILE)
        words.append(tiles.unflatten(-1, (-1, 32, 4)))
        start += n
    joined = torch.cat(words, 3)
    unit = words_per_vector(joined.shape[3])
    return joined.unflatten(3, (-1, unit)).transpose(4, 5).flatten(3)


def _from_class_codes(tiles: Tensor, slot: Tensor, form: ClassFormat, value: bool) -> Tensor:
    """Inverse of `_class_codes`: codes of the tokens, sorted by class, 0 bits last."""
    classes = form.value if value else form.key
    unit = words_per_vector(sum(classes.words))
    words = tiles.unflatten(-1, (-1, 32, unit, 4)).transpose(4, 5).flatten(3, 4)
    order = value_order if value else key_order
    parts = []
    for (bits, n), columns, part in zip(
        classes.sizes, classes.columns, words.split(classes.words, 3), strict=True
    ):
        codes = untile_codes(part.flatten(3), order(columns * COLUMN, bits, 1), bits, TILE)
        parts.append(codes[..., :n])
    joined = torch.nn.functional.pad(torch.cat(parts, -1), (0, form.head_dim - classes.channels))
    return joined.gather(2, slot[:, None, :, None].expand(-1, joined.shape[1], -1, form.head_dim))


def _key_parameters(key: PackedTensor, token: Tensor, form: ClassFormat) -> list[Tensor]:
    """Bytes of zero-points, scales and channels of every tile, [batch, heads, tiles, bytes]."""
    first = token[:, ::TILE]
    group = key.blocks.block_of_token(key.blocks.tokens).gather(1, first.clamp_min(0))
    order, coded = key.channel_order, form.key.channels
    zero = torch.empty_like(key.zero_point).scatter_(-1, order, key.zero_point)
    place = form.key.place_of_rank.to(first.device)

    def by_tile(x: Tensor) -> Tensor:
        index = group[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index).masked_fill((first < 0)[:, None, :, None], 0)

    def by_place(x: Tensor) -> Tensor:
        tiles = by_tile(x)
        out = tiles.new_zeros(*tiles.shape[:3], form.key.places)
        return out.index_copy_(-1, place, tiles)

    filled = torch.nn.functional.pad(by_tile(zero), (0, form.channels - form.head_dim))
    parts = (filled, by_place(key.scale), by_place(order[..., :coded].to(torch.uint8)))
    return [part.contiguous().view(torch.uint8) for part in parts]


def _from_key_parameters(
    zero: Tensor, scale: Tensor, channel: Tensor, tile: Tensor, form: ClassFormat
) -> dict[str, Tensor]:
    """Inverse of `_key_parameters`, from the first tile of every group."""
    place = form.key.place_of_rank.to(tile.device)

    def by_group(x: Tensor) -> Tensor:
        index = tile[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index).contiguous()

    order = by_group(channel)[..., place].long()
    numbers = _class_numbers(order, form.key, form.head_dim)
    zeros = by_group(zero).view(torch.float16)[..., : form.head_dim]
    return {
        "scale": by_group(scale).view(torch.float16)[..., place],
        "zero_point": zeros.gather(-1, class_order(numbers)),
        "classes": pack(numbers, CLASS_BITS),
    }


def _class_numbers(order: Tensor, classes: Classes, head_dim: int) -> Tensor:
    """The class number of every channel from the channels of the coded ranks, class by class."""
    sizes = torch.tensor([n for _, n in classes.sizes])
    number = torch.arange(len(sizes), dtype=torch.uint8).repeat_interleave(sizes)
    rest = torch.full((*order.shape[:3], head_dim), len(sizes), dtype=torch.uint8)
    index = order[..., : classes.channels]
    return rest.to(order.device).scatter_(-1, index, number.to(order.device).expand_as(index))


def _largest_scales(key: PackedTensor, spans: BlockTable) -> Tensor:
    """The largest scale of every channel over the groups of each span; 0 without codes."""
    real = (key.blocks.sizes > 0)[:, None, :, None]
    scale = key.full_scale.masked_fill(~real, 0)
    by_channel = torch.empty_like(scale).scatter_(-1, key.channel_order, scale)
    first = key.blocks.offsets[:, :-1].clamp_max(max(spans.tokens - 1, 0))
    span = spans.block_of_token(spans.tokens).gather(1, first)[:, None, :, None]
    top = scale.new_zeros(*scale.shape[:2], spans.blocks, scale.shape[3])
    return top.scatter_reduce_(2, span.expand_as(by_channel), by_channel, "amax")
