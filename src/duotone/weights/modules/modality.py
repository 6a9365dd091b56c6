"""Visual rows of a language model's activations, shared by all its linears.

One `Modality` belongs to one model. The caller sets a step's mask before the step runs; decode
steps and text prompts have none. The linears pick their static scale by it (MSQ, MQuant eq. 3-4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Modality:
    """The visual rows of the step that runs now: bool [tokens], the batch flattened, or None.

    first: the number of visual rows where these come first (AIFS), so that scales go by slices.
    None where visual rows may lie anywhere, so that each row picks its scale.
    """

    def __init__(self) -> None:
        self.visual: Tensor | None = None
        self.first: int | None = None

    def set(self, visual: Tensor | None, first: int | None = None) -> None:
        """Set the mask of the next step; `visual` [B, T]."""
        self.visual, self.first = None if visual is None else visual.flatten(), first

    @contextmanager
    def rows(self, visual: Tensor | None) -> Iterator[None]:
        """Mark the visual tokens of the model's input by `visual` [B, T], within the block."""
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
