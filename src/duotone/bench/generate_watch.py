"""A stopping criterion that watches a call of `generate` from where the user stands."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

# Tokens before the medians, and the fewest tokens of a call.
WARM_TOKENS, FEWEST_TOKENS = 16, 24


class Watch:
    """Notes when each token is there, and ends a call that is late.

    is_late: called after every token; a late call ends once it has `FEWEST_TOKENS`.
    """

    def __init__(self, device: torch.device, is_late: Callable[[], bool]) -> None:
        self.device, self.is_late = device, is_late
        # Seconds at which tokens were there.
        self.times_s: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time; stop a call that is late."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times_s.append(perf_counter())
        is_over = len(self.times_s) >= FEWEST_TOKENS and self.is_late()
        return torch.full((len(ids),), is_over, dtype=torch.bool, device=ids.device)
