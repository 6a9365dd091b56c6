"""Result of a metric: statistics per sample, and the rule from their sums to the value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Combine = Callable[[np.ndarray], np.ndarray]


def ratio_of_sums(sums: np.ndarray) -> np.ndarray:
    """sums [..., 2] -> sums[..., 0] / sums[..., 1]; 0 where the denominator is 0."""
    numerator, denominator = sums[..., 0], sums[..., 1]
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator != 0)


@dataclass(frozen=True)
class Score:
    """One metric over a set of samples, kept resampleable.

    value = combine(statistics.sum(over samples)). A mean is the ratio of sums of (score, 1); a
    precision of (hits, guesses); BLEU has n-gram counts. So a bootstrap resamples rows of
    `statistics` and never scores a text twice.
    """

    statistics: np.ndarray  # [samples, columns]
    combine: Combine = ratio_of_sums

    def __post_init__(self):
        if self.statistics.ndim != 2 or self.statistics.shape[0] == 0:
            raise ValueError(
                f"statistics must be [samples, columns] with at least one sample, got shape "
                f"{self.statistics.shape}; score at least one prediction"
            )

    @property
    def value(self) -> float:
        """The metric over all samples."""
        return float(self.combine(self.statistics.sum(axis=0)))

    @property
    def samples(self) -> int:
        """Number of scored samples."""
        return self.statistics.shape[0]

    @staticmethod
    def mean(per_sample: Sequence[float]) -> "Score":
        """The mean of one number per sample."""
        per_sample = np.asarray(per_sample, dtype=np.float64).reshape(-1)
        return Score(np.stack([per_sample, np.ones_like(per_sample)], axis=1))


def check_aligned(predictions: Sequence, references: Sequence) -> None:
    """Raise unless there is one reference entry per prediction, and at least one."""
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"metrics need one reference entry per prediction and at least one of them, got "
            f"{len(predictions)} predictions and {len(references)} references"
        )
