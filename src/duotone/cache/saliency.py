"""Foreground and background: which tokens of a visual span stand out.

A token's score differs from the span's mean score by q . (k - mean). In a calibrated basis of keys
the coefficients' squared length is the mean square of that over the queries the basis was made
from (`calibrate.transform`: |c|^2 = x^T C x with C the queries' second moment), so

    prominence = |c - mean|^2,    c = k E

orders tokens by how far attention can tell them from the rest. Without a basis it is the plain
distance. The few tokens in front carry most of what attention takes from a picture; they are worth
more bits than those behind, and smaller ranges are a gain for both.
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
    """A step's visual tokens in whole spans. take: where they are; blocks: of the taken tokens."""

    take: Move
    blocks: BlockTable


def prominence_order(
    coefficients: States, blocks: BlockTable
) -> Int[Tensor, "batch kv_heads tokens"]:
    """Tokens of every block by falling prominence, ties in their order; others as they are.

    coefficients: keys in the basis that they are quantized in.
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
    """K and V with the tokens of every span in the order of prominence, all others in place."""
    wide = spans.take.apply(key).to(torch.promote_types(key.dtype, torch.float32))
    order = prominence_order(into_basis(wide, transform), spans.blocks)
    places = spans.take.index[:, None].expand_as(order)
    index = torch.arange(key.shape[2], device=key.device).expand(*key.shape[:3]).clone()
    # `select` picks distinct tokens, so every place is written once.
    index.scatter_(2, places, places.gather(2, order))
    return tuple(x.gather(2, index[..., None].expand_as(x)) for x in (key, value))
