"""Static ranges of activations from a stream of tensors: a histogram of magnitudes that can widen.

Memory does not grow with the data: BINS counts per tensor. The first magnitude that is not 0 sets
the range. Where one exceeds it, it doubles and neighbouring bins merge, so counts stay exact.

    minmax      clip = largest magnitude seen
    percentile  clip = magnitude that a share of PERCENTILE of all numbers does not exceed
    mse         clip of least expected squared error: s^2 / 12 inside (a number's own square
                where it rounds to 0), the squared excess outside; s = clip / 127
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

BINS = 4096
PERCENTILE = 0.9999
HIGHEST_CODE = 127
MSE_STEPS = 200
MSE_SMALLEST = 1 / 50
Method = Literal["minmax", "percentile", "mse"]
METHODS = ("minmax", "percentile", "mse")


class Magnitudes:
    """Counts of |x| in BINS equal bins from 0 to `limit`, and the largest |x|.

    limit: 0 while only zeros were seen, which are in bin 0 whatever it becomes.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.limit = 0.0
        self.largest = 0.0

    @property
    def numbers(self) -> int:
        """Count of numbers seen."""
        return 0 if self.counts is None else int(self.counts.sum())

    def update(self, x: Tensor) -> None:
        """Count all numbers of x. Errors: ValueError for inf or nan."""
        if x.numel() == 0:
            return
        magnitude = x.detach().abs().float().flatten()
        largest = float(magnitude.max())
        if not math.isfinite(largest):
            raise ValueError("activations to calibrate on must be finite, got inf or nan")
        self._widen(largest, x.device)
        self.counts += torch.bincount(self._bins(magnitude), minlength=BINS).double()
        self.largest = max(self.largest, largest)

    def _widen(self, largest: float, device: torch.device) -> None:
        if self.counts is None:
            self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)
        if self.limit == 0:
            self.limit = largest
        while self.limit < largest:
            merged = self.counts.unflatten(0, (-1, 2)).sum(1)
            self.counts = torch.cat((merged, torch.zeros_like(merged)))
            self.limit *= 2

    def _bins(self, magnitude: Tensor) -> Tensor:
        if self.limit == 0:
            return torch.zeros_like(magnitude, dtype=torch.long)
        return (magnitude * (BINS / self.limit)).long().clamp_(max=BINS - 1)

    def merge(self, other: Magnitudes) -> None:
        """Add another histogram's counts: its bins go to the bins of their centres."""
        if other.counts is None:
            return
        self._widen(other.largest, other.counts.device)
        centre = (torch.arange(BINS, device=other.counts.device) + 0.5) * (other.limit / BINS)
        self.counts.index_add_(0, self._bins(centre.clamp(max=self.limit)), other.counts)
        self.largest = max(self.largest, other.largest)

    def clip(self, method: Method) -> float:
        """The magnitude that the highest code stands for; 1 where only zeros were seen.

        Errors: ValueError for an unknown method, or before anything was seen.
        """
        if method not in METHODS:
            raise ValueError(f"a range must be one of {METHODS}, got {method!r}")
        if self.counts is None:
            raise ValueError("a range needs numbers, got none; calibrate with more samples")
        if self.largest == 0:
            return 1.0
        if method == "minmax":
            return self.largest
        return self._percentile() if method == "percentile" else self._least_error()

    def scale(self, method: Method) -> float:
        """clip / 127."""
        return self.clip(method) / HIGHEST_CODE

    def _percentile(self) -> float:
        share = self.counts.cumsum(0) / self.counts.sum()
        place = int((share < PERCENTILE).sum())
        return min((place + 1) * self.limit / BINS, self.largest)

    def _least_error(self) -> float:
        counts = self.counts.cpu()
        centre = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.limit / BINS)
        fractions = torch.linspace(MSE_SMALLEST, 1, MSE_STEPS, dtype=torch.float64)
        clips = (fractions * self.largest)[:, None]
        step = clips / HIGHEST_CODE
        noise = torch.where(centre < step / 2, centre.square(), step.square() / 12)
        errors = torch.where(centre > clips, (centre - clips).square(), noise)
        return float(clips[(errors * counts).sum(1).argmin(), 0])
