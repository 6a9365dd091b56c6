"""Lengths of calibration samples, against the window of a text stream."""

from __future__ import annotations

from collections.abc import Sequence

from duotone.hf.model.facts import ModelFacts

from .moments import CalibrationBatch
from .settings import Settings


def check_lengths(
    batches: Sequence[CalibrationBatch], facts: ModelFacts, settings: Settings
) -> None:
    """Raise ValueError where a stream of these samples and answers would never be packed."""
    if facts.is_multimodal:
        return
    longest = max(
        int(batch.tensors["attention_mask"].sum(1).max()) + batch.answer_tokens for batch in batches
    )
    needed = settings.recent + settings.group
    if longest < needed:
        raise ValueError(
            f"samples must be long enough to be packed: a stream with {settings.recent} recent "
            f"tokens and groups of {settings.group} packs nothing below {needed} tokens; the "
            f"longest sample has {longest} with its answer. Give longer samples, or a smaller "
            "--recent or --group"
        )
