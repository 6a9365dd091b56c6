"""Batches of models that cannot read on after a dense cache: each spec decodes token by token.

Slower than `prefilled`, and it works for every model that `generate` works for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duotone.evaluate.forcing import LogitsRecorder, forced_through
from duotone.inference.batch import Batch, generate, make_cache

from .packed import Packed, Watch


@dataclass(frozen=True)
class Answered:
    """One batch with its 16-bit answers, and their logits [B, vocabulary] of every step."""

    batch: Batch
    token_ids: Sequence[Sequence[int]]
    logits: Sequence[Tensor]

    @property
    def mask(self) -> Tensor:
        """Padding of the prompts."""
        return self.batch.attention_mask


@torch.inference_mode()
def answer(model: Any, batch: Batch, max_new_tokens: int) -> Answered:
    """Answer a batch through the 16-bit cache."""
    recorder, cache = LogitsRecorder(), make_cache(model, None, batch)
    given = generate(model, batch, cache, max_new_tokens, logits_processors=[recorder])
    return Answered(batch, given.token_ids, recorder.logits)


def forced_along(model: Any, answered: Answered, cache: Any) -> tuple[np.ndarray, Packed]:
    """(rows [B, 3] of `forced_agreement`, tokens packed for the last step) of a cache."""
    watch, given = Watch(cache), (answered.token_ids, answered.logits)
    rows = forced_through(model, answered.batch, cache, *given, watching=[watch])
    return rows, watch.packed
