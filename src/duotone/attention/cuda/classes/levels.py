"""Levels of the blocks of K or V and the order of their channels, and torch's way to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.classes.format import WIDTHS, Classes
from duotone.cache import BlockTable, PackedTensor
from duotone.quant import TensorSpec, pack
from duotone.quant.affine import block_levels
from duotone.quant.classes import CLASS_BITS, class_order, pack_classes
from duotone.quant.ranges import nearest_code
from duotone.quant.small_floats import small_levels

States = Float[Tensor, "batch kv_heads tokens head_dim"]


@dataclass(frozen=True)
class SortedLevels:
    """Levels of K's or V's blocks, sorted by class, fp16, and the channel of each of them.

    Where a spec stores 8 bits, `parameters` rounds these levels.

    chosen_scale, chosen_zero: codes are the nearest of these. scale, zero: what codes stand for.
    numbers: the buffer of them all, where they have one.
    """

    blocks: BlockTable
    order: Int[Tensor, "batch kv_heads blocks head_dim"]
    chosen_scale: Float[Tensor, "batch kv_heads blocks coded"]
    chosen_zero: Float[Tensor, "batch kv_heads blocks coded"]
    scale: Float[Tensor, "batch kv_heads blocks coded"]
    zero: Float[Tensor, "batch kv_heads blocks head_dim"]
    numbers: Float[Tensor, " levels"] | None = None

    @classmethod
    def empty(cls, blocks: BlockTable, rows: tuple[int, int], channels: int, coded: int) -> Self:
        """Room for the levels of all blocks, in one buffer.

        rows: (batch, kv_heads). The host waits once per table: blocks without tokens get zeros.
        """
        shape = (*rows, blocks.blocks)
        sizes = [math.prod(shape) * n for n in (coded, coded, coded, channels)]
        make = torch.empty if blocks.is_uniform else torch.zeros
        device = blocks.offsets.device
        numbers = make(sum(sizes), dtype=torch.float16, device=device)
        parts = (part.view(*shape, -1) for part in numbers.split(sizes))
        order = torch.empty((*shape, channels), dtype=torch.long, device=device)
        return cls(blocks, order, *parts, numbers)

    @property
    def total(self) -> Float[Tensor, ""]:
        """The sum of all levels in fp32; finite if all of them are."""
        return self.numbers.sum(dtype=torch.float32)

    @cached_property
    def channels(self) -> UInt8[Tensor, "batch kv_heads blocks head_dim"]:
        """`order` in bytes."""
        return self.order.to(torch.uint8)

    def parameters(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """Scales and zero-points as a `PackedTensor` has them, middles in 8 bits."""
        if spec.param_dtype != "float8":
            return self.scale, self.zero
        head_dim = self.zero.shape[-1]
        top = _top_of_rank(Classes.of(spec, head_dim), head_dim, self.scale.device)
        return small_levels(self.scale, self.zero, top)

    def packed(self, x: States, spec: TensorSpec) -> PackedTensor:
        """x by these levels in canonical order, by torch.

        The reference of `classes.pack.pack_codes`. x: in its basis.
        """
        classes = Classes.of(spec, x.shape[3])
        number = self._by_channel(classes.number_of_rank(x.shape[3]).to(x.device))
        widths = torch.tensor([*(bits for bits, _ in classes.sizes), 0], device=x.device)
        top = (2 ** widths[number.long()] - 1)[..., None]
        scale, zero = (
            self._by_channel(part).float()[..., None]
            for part in (self.chosen_scale, self.chosen_zero)
        )
        slots = self.blocks.to_slots(x).float().mT
        codes = nearest_code(slots, scale, zero, max(WIDTHS)).minimum(top).mT
        codes = (codes * self.blocks.mask[:, None, ..., None]).to(torch.uint8)
        parts = dict(zip(("scale", "zero_point"), self.parameters(spec), strict=True))
        if spec.classes is None:
            parts["codes"] = pack(codes, spec.bits)
        else:
            order = self.order[..., None, :].expand_as(codes)
            parts["codes"] = pack_classes(codes.gather(-1, order), spec)
            parts["classes"] = pack(number, CLASS_BITS)
        parts["codes"] = self.blocks.to_tokens(parts["codes"])
        return PackedTensor(spec, x.shape[3], x.dtype, self.blocks, **parts)

    def _by_channel(self, by_rank: Tensor) -> Tensor:
        """In the order of channels; 0 for ranks that are missing."""
        full = F.pad(by_rank, (0, self.order.shape[-1] - by_rank.shape[-1])).expand_as(self.order)
        return torch.empty_like(full).scatter_(-1, self.order, full)


@cache
def _top_of_rank(classes: Classes, head_dim: int, device: torch.device) -> Tensor:
    """Largest codes on a device, copied once: a copy cannot be captured."""
    return classes.top_of_rank(head_dim).to(device)


def torch_levels(x: States, spec: TensorSpec, blocks: BlockTable, coded: int) -> SortedLevels:
    """Levels of the blocks of x, as `cache.packing.pack_tensor` finds them. coded: channels."""
    slots = blocks.to_slots(x)
    mask = blocks.mask[:, None].expand(slots.shape[:4])
    levels = block_levels(slots, spec.replace(group=None, param_dtype="float16"), mask)
    numbers = levels.classes
    if numbers is None:
        numbers = torch.zeros_like(levels.scale, dtype=torch.uint8)
    order = class_order(numbers)

    def by_rank(parameter: Tensor, ranks: int | None = None) -> Tensor:
        return parameter.gather(-1, order)[..., :ranks].contiguous()

    return SortedLevels(
        blocks,
        order,
        by_rank(levels.chosen_scale, coded),
        by_rank(levels.chosen_zero, coded),
        by_rank(levels.scale, coded),
        by_rank(levels.zero_point),
    )
