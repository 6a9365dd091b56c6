"""Samples -> prefilled batches, and counts of their prompts before any model work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from duotone.inference.batch import prepare
from duotone.loading import Loaded, visual_mask

from .answered import answer
from .objective import Ready
from .prefilled import can_prefill, later_where_possible, prefill


@dataclass(frozen=True)
class PromptCounts:
    """Mean tokens per prompt over all samples, and whether every prompt has a picture."""

    visual: int
    text: int
    all_pictured: bool


def prompt_counts(loaded: Loaded, encoded: Sequence[dict[str, torch.Tensor]]) -> PromptCounts:
    """Count the tokens of encoded batches."""
    visual, real = [], []
    for batch in encoded:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        visual += visual_mask(loaded.model.config, ids).sum(1).tolist()
        real += mask.sum(1).tolist()
    mean_visual = sum(visual) // len(visual)
    return PromptCounts(mean_visual, sum(real) // len(real) - mean_visual, min(visual) > 0)


def ready(model: Any, encoded: dict[str, torch.Tensor], max_new_tokens: int) -> Ready:
    """A batch answered through the 16-bit cache once, for the fastest way of measuring it.

    Questions about pictures are read after these where the model can read prompts in parts.
    """
    batch = prepare(model, encoded)
    if can_prefill(model, batch):
        return prefill(model, later_where_possible(batch), max_new_tokens)
    return answer(model, batch, max_new_tokens)
