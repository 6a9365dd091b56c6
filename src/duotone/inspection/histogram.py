"""A histogram of numbers whose range is not known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_BINS = 256
FINEST = 2.0**-10


@dataclass
class Histogram:
    """Counts in bins [i width, (i + 1) width), first <= i; `width` doubles when they get too many.

    Widths are powers of two, so that two bins join to one and nothing has to be counted again.
    """

    counts: Int[Tensor, " bins"] | None = None
    first: int = 0
    width: float = FINEST

    @property
    def total(self) -> int:
        """Numbers counted."""
        return 0 if self.counts is None else int(self.counts.sum())

    def add(self, x: Float[Tensor, "*numbers"]) -> None:
        """Count all numbers of x. Errors: ValueError if some are not finite."""
        x = x.detach().flatten().double()
        if not len(x):
            return
        low, high = float(x.min()), float(x.max())
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            raise ValueError(f"a histogram counts finite numbers, got a range of {low} to {high}")
        while self._span(low, high)[1] >= MAX_BINS:
            self._coarsen()
        first, bins = self._span(low, high)
        counts = torch.bincount((x / self.width).floor().long() - first, minlength=bins + 1).cpu()
        if self.counts is not None:
            start = self.first - first
            counts[start : start + len(self.counts)] += self.counts
        self.counts, self.first = counts, first

    def _span(self, low: float, high: float) -> tuple[int, int]:
        """(first bin, bins after it) that hold these numbers and all counted ones."""
        first, last = int(low // self.width), int(high // self.width)
        if self.counts is not None:
            first, last = min(first, self.first), max(last, self.first + len(self.counts) - 1)
        return first, last - first

    def _coarsen(self) -> None:
        """Join bins in pairs."""
        self.width *= 2
        if self.counts is not None:
            padded = torch.nn.functional.pad(self.counts, (self.first % 2, 0))
            padded = torch.nn.functional.pad(padded, (0, len(padded) % 2))
            self.counts, self.first = padded.unflatten(0, (-1, 2)).sum(1), self.first // 2

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: left edge of the first bin, width, counts."""
        counts = [] if self.counts is None else self.counts.tolist()
        return {"start": self.first * self.width, "width": self.width, "counts": counts}
