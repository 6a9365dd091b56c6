"""Bootstrap 95 % intervals of a score, and of the difference of two scores on the same samples.

Percentile bootstrap (Efron 1979): as many samples as there are, drawn with replacement. The metric
is recomputed from the resampled sums of its statistics. The draws depend only on the seed and the
number of samples. So two schemes scored on the same samples see the same draws, which makes the
difference paired. For CIDEr the statistics are per-sample scores under the document frequencies of
the whole corpus, which are held fixed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from .score import Score

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """JSON-safe fields."""
        return asdict(self)


def _resampled_values(score: Score, resamples: int, seed: int) -> np.ndarray:
    """Values [resamples] of the metric on samples drawn with replacement."""
    return score.combine(_draws(score.samples, resamples, seed) @ score.statistics)


# Tables compare hundreds of scores of equal samples.
@lru_cache(maxsize=8)
def _draws(n: int, resamples: int, seed: int) -> np.ndarray:
    """How often each of n samples is drawn [resamples, n]."""
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    return draws.astype(np.float64)


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def confidence_interval(score: Score, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The score's value with its bootstrap interval."""
    return Interval(score.value, *_percentiles(_resampled_values(score, resamples, seed)))


def paired_difference(
    score: Score, baseline: Score, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """`score - baseline` on the same samples in the same order, with its bootstrap interval."""
    _check_same_samples(score, baseline)
    values = _resampled_values(score, resamples, seed)
    differences = values - _resampled_values(baseline, resamples, seed)
    return Interval(score.value - baseline.value, *_percentiles(differences))


def paired_ratio(
    scores: Sequence[Score],
    baselines: Sequence[Score],
    *,
    floor: float = 0.0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Geometric mean over tasks of (score + floor) / (baseline + floor), with its interval.

    Each task has its own samples, the same for score and baseline; tasks are resampled apart.
    """
    logs, values = np.zeros(resamples), 0.0
    for task, (score, baseline) in enumerate(zip(scores, baselines, strict=True)):
        _check_same_samples(score, baseline)
        drawn = (_resampled_values(one, resamples, seed + task) for one in (score, baseline))
        logs = logs + _log_ratio(*drawn, floor) / len(scores)
        values += float(_log_ratio(score.value, baseline.value, floor)) / len(scores)
    low, high = np.exp(_percentiles(logs))
    return Interval(float(np.exp(values)), float(low), float(high))


def _log_ratio(score: np.ndarray | float, baseline: np.ndarray | float, floor: float) -> np.ndarray:
    return np.log(np.maximum(score, 0) + floor) - np.log(np.maximum(baseline, 0) + floor)


def _check_same_samples(score: Score, baseline: Score) -> None:
    if score.samples != baseline.samples:
        raise ValueError(
            f"a paired comparison needs the same samples on both sides, got {score.samples} and "
            f"{baseline.samples}; score both schemes on the same split"
        )
