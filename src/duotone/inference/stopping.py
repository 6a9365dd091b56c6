"""A stopping criterion for `generate` that stops nothing: a clock."""

from time import perf_counter
from typing import Any

import torch


class StepClock:
    """A stopping criterion that never stops and notes the time of each token."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time; stop nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times_s.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def ms_per_token(self) -> float | None:
        """Median time between tokens, prefill left out; None with fewer than two tokens."""
        gaps = [1e3 * (b - a) for a, b in zip(self.times_s, self.times_s[1:], strict=False)]
        return sorted(gaps)[len(gaps) // 2] if gaps else None
