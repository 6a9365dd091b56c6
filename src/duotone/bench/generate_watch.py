"""A stopping criterion that watches a call of `generate` from where the user stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duotone.inference.stopping import StepClock

# Tokens before the medians, and the fewest tokens of a call.
WARM_TOKENS, FEWEST_TOKENS = 16, 24


class Watch(StepClock):
    """A clock that ends a call that is late.

    is_late: called after every token; a late call ends once it has `FEWEST_TOKENS`.
    """

    def __init__(self, device: torch.device, is_late: Callable[[], bool]) -> None:
        super().__init__(device)
        self.is_late = is_late

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time; stop a call that is late."""
        going_on = super().__call__(input_ids, scores)
        is_over = len(self.times_s) >= FEWEST_TOKENS and self.is_late()
        return torch.full_like(going_on, is_over)
