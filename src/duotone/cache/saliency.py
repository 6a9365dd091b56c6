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

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Move, valid_mask
from duotone.quant.rotation import into_basis

States = Float[Tensor, "batch kv_heads tokens channels"]


@dataclass(frozen=True)
class Spans:
    """Visual tokens of a step in whole spans. take: their positions; blocks: of taken tokens."""

    take: Move
    blocks: BlockTable


def saliency_order(
    coefficients: States, blocks: BlockTable
) -> Int[Tensor, "batch kv_heads tokens"]:
    """Order of the tokens of every block by falling saliency; ties and other tokens stay in order.

    coefficients: keys in the basis of their quantization.
    """
    slots, mask = blocks.to_slots(coefficients), blocks.mask[:, None]
    slots = slots.masked_fill(~mask[..., None], 0)
    mean = slots.sum(3, keepdim=True) / blocks.sizes[:, None, :, None, None].clamp_min(1)
    distance = (slots - mean).square().sum(-1).masked_fill(~mask, -1)
    places = distance.argsort(dim=-1, descending=True, stable=True)
    order = blocks.to_tokens(places + blocks.offsets[:, None, :-1, None])
    own = torch.arange(coefficients.shape[2], device=coefficients.device)
    order = torch.nn.functional.pad(order, (0, len(own) - order.shape[2]))
    return torch.where(valid_mask(blocks.lengths, len(own))[:, None], order, own)


def foreground_first(
    key: States, value: States, spans: Spans, transform: str | None
) -> tuple[States, States]:
    """Sort the tokens of every span in K and V by saliency; all other tokens stay in place."""
    wide = spans.take.apply(key).to(torch.promote_types(key.dtype, torch.float32))
    order = saliency_order(into_basis(wide, transform), spans.blocks)
    places = spans.take.index[:, None].expand_as(order)
    index = torch.arange(key.shape[2], device=key.device).expand(*key.shape[:3]).clone()
    # `select` picks distinct tokens, so every slot is written once.
    index.scatter_(2, places, places.gather(2, order))
    return tuple(x.gather(2, index[..., None].expand_as(x)) for x in (key, value))
