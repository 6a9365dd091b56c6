"""Saliency of the tokens of a visual span: foreground and background.

A token's score differs from the span's mean score by q . (k - mean). In a calibrated basis of keys
the squared length of coefficients is the mean square of this difference over the calibration
queries: |c|^2 = x^T C x with C the queries' second moment (`calibrate.transform`). Therefore

    saliency = |c - mean|^2,    c = k E

orders tokens by how far attention can tell them from the rest. Without a basis saliency is the
plain distance. The few salient tokens carry most of the attention output of a picture. They are
worth more bits than the other tokens, and both parts gain by smaller ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Move, valid_mask
from duotone.quant.rotation import into_basis

States = Float[Tensor, "batch kv_heads tokens channels"]
Parts = Float[Tensor, "batch kv_heads taken channels"]


@dataclass(frozen=True)
class Spans:
    """Visual tokens of a step in whole spans, and where each part takes them; equal for all layers.

    take: their positions. blocks: of taken tokens. parts: from slots of `blocks`, in which tokens
    are sorted, to the tokens of one part after the other.
    """

    take: Move
    blocks: BlockTable
    parts: Move

    @classmethod
    def of(
        cls,
        packed: Bool[Tensor, "batch tokens"],
        take: Move,
        blocks: BlockTable,
        parts: Sequence[Move],
    ) -> Spans:
        """Spans of the packed tokens. parts: positions of each part's tokens, span by span."""
        rank = (packed.cumsum(-1) - 1).clamp_min(0)
        places = torch.cat([part.index for part in parts], 1)
        slot = blocks.slot_of_token.clamp_max(blocks.blocks * blocks.longest - 1)
        index = slot.gather(1, rank.gather(1, places))
        return cls(take, blocks, Move(index, torch.full_like(take.lengths, places.shape[1])))

    @cached_property
    def slots(self) -> Move:
        """Positions of the tokens of all slots; an empty slot has one of its sequence."""
        index = self.take.index.gather(1, self.blocks.index)
        return Move(index, self.take.lengths)

    @cached_property
    def empty(self) -> Bool[Tensor, "batch 1 blocks longest"] | None:
        """True at slots without a token; None where all slots have one."""
        return None if self.blocks.is_uniform else ~self.blocks.mask[:, None]


def saliency_order(
    coefficients: States, blocks: BlockTable
) -> Int[Tensor, "batch kv_heads tokens"]:
    """Order of the tokens of every block by falling saliency; ties and other tokens stay in order.

    coefficients: keys in the basis of their quantization.
    """
    empty = ~blocks.mask[:, None]
    places = _falling(blocks.to_slots(coefficients), blocks, empty)
    order = blocks.to_tokens(places + blocks.offsets[:, None, :-1, None])
    own = torch.arange(coefficients.shape[2], device=coefficients.device)
    order = F.pad(order, (0, len(own) - order.shape[2]))
    return torch.where(valid_mask(blocks.lengths, len(own))[:, None], order, own)


def foreground_first(
    key: States, value: States, spans: Spans, transform: str | None
) -> tuple[Parts, Parts]:
    """Take the tokens of spans out of K and V: each part's after the other, sorted by saliency."""
    places = _falling(_coefficients(key, spans, transform), spans.blocks, spans.empty)
    positions = spans.slots.index.view(len(places), 1, *places.shape[2:]).expand_as(places)
    index = spans.parts.pick(positions.gather(3, places).flatten(2))[..., None]
    return tuple(x.gather(2, index.expand(*index.shape[:3], x.shape[3])) for x in (key, value))


def _coefficients(key: States, spans: Spans, transform: str | None) -> Tensor:
    """Keys in the slots of spans, in fp32 and in the basis of `transform`."""
    blocks = spans.blocks
    if transform is None:
        slots = spans.slots.pick(key).unflatten(2, (blocks.blocks, blocks.longest))
        return _widened(slots)
    # A product's rounding depends on its size: that of the tokens, not of the slots.
    return blocks.to_slots(into_basis(_widened(spans.take.pick(key)), transform))


def _widened(x: Tensor) -> Tensor:
    """A contiguous copy in fp32 or wider: the order of sums follows the order in memory."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide, memory_format=torch.contiguous_format).contiguous()


def _falling(
    slots: Float[Tensor, "batch kv_heads blocks longest channels"],
    blocks: BlockTable,
    empty: Bool[Tensor, "batch 1 blocks longest"] | None,
) -> Int[Tensor, "batch kv_heads blocks longest"]:
    """Places of the tokens of every block by falling saliency, then the empty ones."""
    sizes = blocks.sizes[:, None, :, None, None]
    if empty is not None:
        slots, sizes = slots.masked_fill(empty[..., None], 0), sizes.clamp_min(1)
    mean = slots.sum(3, keepdim=True) / sizes
    # In one pass, where a difference and its square are two.
    distance = F.mse_loss(slots, mean.expand_as(slots), reduction="none").sum(-1)
    if empty is not None:
        distance = distance.masked_fill(empty, -1)
    return distance.argsort(dim=-1, descending=True, stable=True)
