"""A stopping criterion that watches a call of `generate` from where the user stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType

# Tokens before the medians, steps that are profiled, and the fewest tokens of a call.
WARM_TOKENS, PROFILED = 16, 4
FEWEST_TOKENS = WARM_TOKENS + 2 * PROFILED


class Watch:
    """Notes when each token is there, profiles the last steps, and ends a call that is late.

    tokens: that the call makes. is_late: called after every token; a late call ends once it has
    `FEWEST_TOKENS`. profiled: whether the GPU's time of the last steps is taken as well.
    """

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        is_late: Callable[[], bool],
        profiled: bool = False,
    ) -> None:
        self.device, self.tokens, self.is_late = device, tokens, is_late
        # Seconds at which tokens were there; those that were profiled are left out.
        self.times_s: list[float] = []
        self.busy_ms: float | None = None
        self._to_profile, self._count, self._left = profiled, 0, PROFILED
        self._profile: Any = None

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time; stop a call that is late."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = perf_counter()
        self._count += 1
        if self._profile is None:
            self.times_s.append(now)
        return torch.full((len(ids),), self._is_over(), dtype=torch.bool, device=ids.device)

    def _is_over(self) -> bool:
        if self._profile is not None:
            self._left -= 1
            if not self._left:
                self._end_profile()
            return not self._left
        late = self._count >= FEWEST_TOKENS - PROFILED and self.is_late()
        if self._to_profile and (late or self._count == self.tokens - PROFILED):
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self._profile.__enter__()
            return False
        return late and self._count >= FEWEST_TOKENS

    def _end_profile(self) -> None:
        self._profile.__exit__(None, None, None)
        self.busy_ms = busy_ms(self._profile.key_averages(), PROFILED)


def busy_ms(events: Iterable[Any], steps: int) -> float | None:
    """Milliseconds per step in which kernels run or memory is copied; None where none was seen."""
    on_gpu = (event for event in events if event.device_type == DeviceType.CUDA)
    total_us = sum(event.self_device_time_total for event in on_gpu)
    return total_us / 1e3 / steps if total_us else None
