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
    """The visual rows of the step that runs now: bool [tokens], the batch flattened, or None.

    first: how many they are where they come first (AIFS), so that scales go by slices; None where
    they lie anywhere, so that each row picks its scale.
    """

    def __init__(self) -> None:
        self.visual: Tensor | None = None
        self.first: int | None = None

    def set(self, visual: Tensor | None, first: int | None = None) -> None:
        """Of the step that comes now; `visual` [B, T]."""
        self.visual, self.first = None if visual is None else visual.flatten(), first

    @contextmanager
    def rows(self, visual: Tensor | None) -> Iterator[None]:
        """Inside: `visual` [B, T] marks the visual tokens of what the model is given."""
        before = self.visual, self.first
        self.set(visual)
        try:
            yield
        finally:
            self.visual, self.first = before

    def row_scale(self, scales: Tensor) -> Tensor:
        """float32 [rows] or [1] from `scales` [text, visual] or [one]; no synchronisation."""
        if len(scales) == 1 or self.visual is None:
            return scales[:1]
        return torch.where(self.visual, scales[1], scales[0])
