"""Search for the largest batch that fits a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duotone.bench.budget import attempt

# The search ends once no batch that is larger by this share can fit, or after so many trials.
PRECISION, MAX_TRIALS = 0.02, 8
# Share of a batch that is tried next where nothing fitted so far; squared after every failure.
BACK = 0.93

Result = Mapping[str, Any]


def largest_fitting(
    run: Callable[[int], Result], guess: int, most: int, budget_bytes: int, one_bytes: int
) -> tuple[int, Result] | None:
    """(batch, result) of the largest batch that runs, to within PRECISION; None: not even one.

    run: takes a batch and returns its "peak_bytes" with whatever else; raises
    torch.OutOfMemoryError where the batch does not fit. most: larger batches are not tried.
    one_bytes: the least that a sequence more takes.
    """
    batch, best, fits = max(1, min(guess, most)), None, 0
    failed: int | None = None
    for trial in range(MAX_TRIALS):
        result = attempt(run, batch)
        if result is None:
            failed = batch
            back = max(1, int(BACK**2**trial * failed))
            batch = (fits + failed) // 2 if fits else min(back, failed - 1)
        else:
            fits, best = batch, result
            batch = min(most, _next(fits, result["peak_bytes"], budget_bytes, one_bytes))
            batch = batch if failed is None else min(batch, (fits + failed) // 2)
        if batch - fits < _step(fits):
            break
    return None if best is None else (fits, best)


def _next(fits: int, peak: int, budget_bytes: int, one_bytes: int) -> int:
    """A larger batch that has room by the peak of one that fits.

    Peaks grow no faster than in proportion to batches; where that leaves no step, no slower than by
    one_bytes each.
    """
    in_proportion = int(fits * budget_bytes / max(1, peak))
    if in_proportion - fits >= _step(fits):
        return in_proportion
    return fits + max(0, budget_bytes - peak) // one_bytes


def _step(fits: int) -> float:
    return max(1, PRECISION * fits)
