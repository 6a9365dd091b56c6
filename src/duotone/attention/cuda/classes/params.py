"""Parameters of class records next to the codes: scales, zero-points and channels of K and V.

All of V's, and K's where it has no groups, belong to spans; else K's lie in its tiles. In 8 bits
(`quant.small_floats`) the exponents of a block begin its row, and come last in a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import EXPONENTS_BYTES, Classes, ClassFormat
from duotone.attention.cuda.shared.slots import TILE
from duotone.cache import BlockTable, PackedTensor
from duotone.quant import TensorSpec, pack
from duotone.quant.classes import CLASS_BITS, class_order, pack_classes
from duotone.tools.kept import cached_once, kept


def span_parameters(x: PackedTensor, name: str) -> dict[str, Tensor]:
    """Scales, zero-points and the channel of each of them, of a tensor without groups.

    name: "key" or "value".
    """
    order = channel_order(x).to(torch.uint8)
    return {f"{name}_scale": x.scale, f"{name}_zero": x.zero_point, f"{name}_order": order}


def from_span_parameters(
    parts: Sequence[Tensor], spec: TensorSpec, classes: Classes
) -> dict[str, Tensor]:
    """Inverse of `span_parameters`: parts of a `PackedTensor`. parts: scale, zero-point, order."""
    scale, zero, order = parts
    numbers = _class_numbers(order.long(), classes, order.shape[-1])
    return {"scale": scale, "zero_point": zero, **_packed_classes(numbers, spec)}


def packed_codes(codes: Tensor, spec: TensorSpec) -> Tensor:
    """Canonical packing of codes that are sorted by class."""
    return pack(codes, spec.bits) if spec.classes is None else pack_classes(codes, spec)


def channel_order(x: PackedTensor) -> Tensor:
    """The channel of every rank, [batch, kv_heads, blocks, head_dim]."""
    order = x.channel_order
    if order is not None:
        return order
    rows = (*x.zero_point.shape[:3], x.head_dim)
    return torch.arange(x.head_dim, device=x.zero_point.device).expand(rows)


def tile_parameters(key: PackedTensor, token: Tensor, form: ClassFormat) -> list[Tensor]:
    """Bytes of the parameters of every tile, [batch, heads, tiles, bytes].

    Zero-points, scales, channels; exponents, where scales and zero-points have 8 bits.
    """
    first = token[:, ::TILE]
    group = key.blocks.block_of_token(key.blocks.tokens).gather(1, first.clamp_min(0))
    order, coded = channel_order(key), form.key.channels
    first_of_rows = int(form.key_small)
    zeros, scales = (x[..., first_of_rows:] for x in (key.zero_point, key.scale))
    zero = torch.empty_like(zeros).scatter_(-1, order, zeros)
    rank = form.key.rank_of_place.to(first.device)

    def by_tile(x: Tensor) -> Tensor:
        index = group[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index).masked_fill((first < 0)[:, None, :, None], 0)

    def by_place(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(by_tile(x), (0, 1))[..., rank]  # -1: the zero at the end

    filled = torch.nn.functional.pad(by_tile(zero), (0, form.channels - form.head_dim))
    parts = [filled, by_place(scales), by_place(order[..., :coded].to(torch.uint8))]
    if form.key_small:
        both = by_tile(torch.cat([key.scale[..., :1], key.zero_point[..., :1]], -1))
        parts.append(torch.nn.functional.pad(both, (0, EXPONENTS_BYTES - 2)))
    return [part.contiguous().view(torch.uint8) for part in parts]


def from_tile_parameters(
    parts: Sequence[Tensor], tile: Tensor, spec: TensorSpec, form: ClassFormat
) -> dict[str, Tensor]:
    """Inverse of `tile_parameters`, from the first tile of every group.

    parts: as `tile_parameters` makes them.
    """
    zero, scale, channel, *exponents = parts
    place = form.key.place_of_rank.to(tile.device)

    def by_group(x: Tensor) -> Tensor:
        index = tile[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index).contiguous()

    numbers = _class_numbers(by_group(channel)[..., place].long(), form.key, form.head_dim)
    kind = torch.uint8 if form.key_small else torch.float16
    zeros = by_group(zero).view(kind)[..., : form.head_dim].gather(-1, class_order(numbers))
    scales = by_group(scale).view(kind)[..., place]
    if exponents:
        of_scale, of_zero = by_group(exponents[0])[..., :2].split(1, -1)
        scales, zeros = torch.cat([of_scale, scales], -1), torch.cat([of_zero, zeros], -1)
    return {"scale": scales, "zero_point": zeros, **_packed_classes(numbers, spec)}


def _packed_classes(numbers: Tensor, spec: TensorSpec) -> dict[str, Tensor]:
    """As a `PackedTensor` has class numbers, if it does."""
    return {} if spec.classes is None else {"classes": pack(numbers, CLASS_BITS)}


def _class_numbers(order: Tensor, classes: Classes, head_dim: int) -> Tensor:
    """The class number of every channel from the channels of the coded ranks, class by class."""
    number = _on_device(order.device, classes, head_dim)[: classes.channels]
    rest = number.new_full((*order.shape[:3], head_dim), len(classes.sizes))
    index = order[..., : classes.channels]
    return rest.scatter_(-1, index, number.expand_as(index))


@cached_once
def _on_device(device: torch.device, classes: Classes, head_dim: int) -> Tensor:
    """`Classes.number_of_rank` on a device, copied once: a copy waits, and cannot be captured."""
    return kept(lambda: classes.number_of_rank(head_dim).to(device), device)


def largest_scales(
    full_scale: Tensor, order: Tensor, groups: BlockTable, spans: BlockTable
) -> Tensor:
    """The largest scale of every channel over the groups of each span; 0 without codes.

    full_scale: [batch, kv_heads, groups, head_dim], sorted by class, as order is.
    """
    scale = full_scale.masked_fill((groups.sizes == 0)[:, None, :, None], 0)
    by_channel = torch.empty_like(scale).scatter_(-1, order, scale)
    first = groups.offsets[:, :-1].clamp_max(max(spans.tokens - 1, 0))
    span = spans.block_of_token(spans.tokens).gather(1, first)[:, None, :, None]
    top = scale.new_zeros(*scale.shape[:2], spans.blocks, scale.shape[3])
    return top.scatter_reduce_(2, span.expand_as(by_channel), by_channel, "amax")
