"""Choice of a batch's tokens for calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from duotone.inference.batch import Batch


@dataclass(frozen=True)
class Places:
    """Tokens of a batch that count.

    spans: [B, T] number of the span a token of K and V belongs to, -1: none. queries: [B, T].
    """

    spans: Int[Tensor, "batch tokens"]
    queries: Bool[Tensor, "batch tokens"]


def visual_places(visual_mask: Bool[Tensor, "batch tokens"], real: Tensor) -> Places:
    """One span per run of visual tokens; queries of the tokens after the last run.

    A sequence without visual tokens does not count.
    """
    visual = visual_mask & real.bool()
    before = torch.nn.functional.pad(visual, (1, 0))[:, :-1]
    starts = (visual & ~before).flatten().cumsum(0).view_as(visual)
    later = visual.int().cumsum(1) == visual.sum(1, keepdim=True)
    after = real.bool() & later & ~visual & visual.any(1, keepdim=True)
    return Places(torch.where(visual, starts - 1, -1), after)


def text_places(real: Tensor, group: int) -> Places:
    """Tokens that are True in `real`; every `group` of a sequence are a span, as of a stream."""
    real = real.bool()
    number = (real.cumsum(1) - 1).clamp(min=0) // group
    spans = number + torch.arange(len(real), device=real.device)[:, None] * (real.shape[1] + 1)
    return Places(torch.where(real, spans, -1), real)


def places_of(batch: Batch, group: int | None) -> Places:
    """Groups of the tokens that are not visual; visual spans where `group` is None."""
    if group is None:
        return visual_places(batch.visual_mask, batch.attention_mask)
    return text_places(batch.attention_mask.bool() & ~batch.visual_mask, group)
