"""Samples -> prefilled batches, and counts of their prompts before any model work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from duotone.hf.model.facts import ModelFacts, model_facts, with_visual
from duotone.inference.batch import prepare, visual_of
from duotone.loading import Loaded

from .answered import Answered, answer
from .objective import Ready
from .prefilled import can_prefill, follow, later_where_possible, prefill


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
        mask = batch["attention_mask"].bool()
        visual += visual_of(loaded.model.config, batch).sum(1).tolist()
        real += mask.sum(1).tolist()
    mean_visual = sum(visual) // len(visual)
    return PromptCounts(mean_visual, sum(real) // len(real) - mean_visual, min(visual) > 0)


def facts_of(model: Any, encoded: Sequence[Mapping[str, torch.Tensor]]) -> ModelFacts:
    """Facts of a model that reads these batches, which may say by a mask what is visual."""
    masks = [batch["visual_mask"] for batch in encoded if "visual_mask" in batch]
    mask = next((one for one in masks if one.any()), next(iter(masks), None))
    return with_visual(model_facts(model, visual_mask=mask), mask)


def ready(model: Any, encoded: dict[str, torch.Tensor], max_new_tokens: int) -> Ready:
    """A batch answered through the 16-bit cache once, for the fastest way of measuring it.

    Questions about pictures are read after these where the model can read prompts in parts.
    """
    batch = prepare(model, encoded)
    if can_prefill(model, batch):
        return prefill(model, later_where_possible(batch), max_new_tokens)
    return answer(model, batch, max_new_tokens)


def ready_after(model: Any, encoded: dict[str, torch.Tensor], first: Ready) -> Ready:
    """A batch for another model, to be compared with the answers of the first one."""
    batch = prepare(model, encoded)
    if isinstance(first, Answered):
        return Answered(batch, first.token_ids, first.logits)
    return follow(model, later_where_possible(batch), first)
