"""Samples -> prefilled batches, and counts of their prompts before any model work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from duotone.inference.batch import EMBEDDABLE_FAMILIES, prepare
from duotone.loading import Loaded, visual_mask
from duotone.tasks import Task

from .prefilled import Prefilled, can_prefill, later_where_possible, prefill


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


def check_model(loaded: Loaded) -> None:
    """Raise for a family whose prompts cannot be read in parts."""
    family = loaded.model.config.model_type
    if loaded.takes_images and family not in EMBEDDABLE_FAMILIES:
        raise ValueError(
            "a search reads prompts in parts, which works for text models and for the families "
            f"{sorted(EMBEDDABLE_FAMILIES)}; got {family!r}. Compare schemes with duotone evaluate"
        )


def prefill_batch(loaded: Loaded, task: Task, encoded: dict[str, torch.Tensor]) -> Prefilled:
    """A batch answered through the 16-bit cache once."""
    batch = later_where_possible(prepare(loaded.model, encoded))
    if not can_prefill(loaded.model, batch):
        raise ValueError(f"{loaded.name!r} cannot read prompts in parts; see check_model")
    return prefill(loaded.model, batch, task.max_new_tokens)
