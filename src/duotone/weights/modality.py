"""Which rows of a language model's activations are visual tokens, told to all its linears at once.

One `Modality` belongs to one model. What runs the model sets the mask of a step before it; decode
steps and text prompts have none. The linears pick their static scale by it (MSQ, MQuant eq. 3-4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Modality:
    """The visual rows of the step that runs now: bool [tokens], the batch flattened, or None."""

    def __init__(self) -> None:
        self.visual: Tensor | None = None

    @contextmanager
    def rows(self, visual: Tensor | None) -> Iterator[None]:
        """Inside: `visual` [B, T] marks the visual tokens of what the model is given."""
        before, self.visual = self.visual, None if visual is None else visual.flatten()
        try:
            yield
        finally:
            self.visual = before

    def row_scale(self, scales: Tensor) -> Tensor:
        """float32 [rows] or [1] from `scales` [text, visual] or [one]; no synchronisation."""
        if len(scales) == 1 or self.visual is None:
            return scales[:1]
        return torch.where(self.visual, scales[1], scales[0])
