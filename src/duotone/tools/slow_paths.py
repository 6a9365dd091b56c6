"""Warn of paths that are slower than the measured kernels, once per model and cause."""

from __future__ import annotations

import warnings

# Cost of leaving the CUDA kernels, by the implementation that takes over.
COSTS = {
    "triton": "runs by Triton, 5 to 20 times slower than the CUDA kernels",
    "reference": "runs by PyTorch operations, slower than attention on a 16-bit copy would be",
}


class SlowPathWarning(UserWarning):
    """A call leaves the kernels that the published times are of."""


class SlowPaths:
    """Warnings that one model, or one cache, has given already."""

    def __init__(self) -> None:
        self.said: set[tuple[str, str]] = set()

    def __deepcopy__(self, memo: object) -> SlowPaths:
        # A copy of a cache is of the same model.
        return self

    def say(self, what: str, how: str, reason: str) -> None:
        """Warn that `what` runs in a slow way, unless the same was said of this cause.

        how: one of `COSTS`, or a sentence's end. reason: a rule, and after "; " what breaks it:
        layers that break one rule each by numbers of their own are one cause.
        """
        cause = (f"{what} {how}", reason.partition("; ")[0])
        if cause in self.said:
            return
        self.said.add(cause)
        message = f"{what} {COSTS.get(how, how)}, because {reason}"
        warnings.warn(message, SlowPathWarning, stacklevel=3)
