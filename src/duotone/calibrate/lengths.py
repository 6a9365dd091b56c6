"""Lengths of calibration samples, against the window of a text stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duotone.hf.model.facts import ModelFacts
from duotone.inference.batch import visual_of

from .moments import CalibrationBatch
from .settings import SINK, Settings


def check_lengths(
    model: Any, batches: Sequence[CalibrationBatch], facts: ModelFacts, settings: Settings
) -> None:
    """Raise ValueError where a stream of these samples and answers would never be packed."""
    if not settings.is_text(facts):
        return
    longest = max(_text_tokens(model, batch) + batch.answer_tokens for batch in batches)
    needed = SINK + settings.recent + settings.group
    if longest < needed:
        raise ValueError(
            f"samples must be long enough to be packed: a stream with {SINK} sinks, "
            f"{settings.recent} recent tokens and groups of {settings.group} packs nothing below "
            f"{needed} tokens; the longest sample has {longest} with its answer. Give longer "
            "samples, or a smaller --recent or --group"
        )


def _text_tokens(model: Any, batch: CalibrationBatch) -> int:
    """Tokens of the longest prompt that are not visual."""
    real = batch.tensors["attention_mask"].bool() & ~visual_of(model.config, batch.tensors)
    return int(real.sum(1).max())
