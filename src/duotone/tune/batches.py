"""Samples -> prefilled batches, and counts of their prompts before any model work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from duotone.evaluate.loader import Encoder, default_workers, load_batches
from duotone.inference.batch import EMBEDDABLE_FAMILIES, prepare
from duotone.loading import Loaded, image_token_ids
from duotone.tasks import Task

from .prefilled import Prefilled, can_prefill, later_where_possible, prefill

Encoded = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class PromptCounts:
    """Mean tokens per prompt over all samples, and whether every prompt has a picture."""

    visual: int
    text: int
    all_pictured: bool


def encode_task(loaded: Loaded, task: Task, batch_size: int) -> Encoded:
    """All samples of a task as tensors of batches."""
    encoder = Encoder(loaded.processor, loaded.takes_images)
    workers = default_workers(loaded.model.device)
    batches = load_batches(task, encoder, "heldout", task.size, batch_size, workers)
    return [encoded for _, encoded in batches]


def prompt_counts(loaded: Loaded, encoded: Sequence[dict[str, torch.Tensor]]) -> PromptCounts:
    """Count the tokens of encoded batches."""
    visual, real = [], []
    for batch in encoded:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        known = torch.tensor(image_token_ids(loaded.model.config), dtype=ids.dtype)
        visual += torch.isin(ids, known).sum(1).tolist()
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


def prefill_task(
    loaded: Loaded,
    task: Task,
    encoded: Sequence[dict[str, torch.Tensor]],
    progress: Callable[[], None] | None = None,
) -> list[Prefilled]:
    """Every batch answered through the 16-bit cache once."""
    made = []
    for tensors in encoded:
        batch = later_where_possible(prepare(loaded.model, tensors))
        if not can_prefill(loaded.model, batch):
            raise ValueError(f"{loaded.name!r} cannot read prompts in parts; see check_model")
        made.append(prefill(loaded.model, batch, task.max_new_tokens))
        if progress:
            progress()
    return made
