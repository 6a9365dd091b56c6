"""Pareto fronts of (true bits, divergence): both are better when smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence

Pair = tuple[float, float]


def pareto_front(points: Sequence[Pair]) -> list[int]:
    """Indices of the points that no other beats, by rising bits; of equal points the first."""
    order = sorted(range(len(points)), key=lambda i: (*points[i], i))
    front, best = [], math.inf
    for i in order:
        if points[i][1] < best:
            front.append(i)
            best = points[i][1]
    return front


def best_within(points: Sequence[Pair], bits: float) -> int | None:
    """Index of the smallest divergence at no more than `bits`; None if all take more."""
    fitting = [i for i, point in enumerate(points) if point[0] <= bits]
    return min(fitting, key=lambda i: (points[i][1], points[i][0]), default=None)


def thinned(front: Sequence[int], points: Sequence[Pair], most: int) -> list[int]:
    """At most `most` points of a front: the ends, and the nearest to even steps of log bits."""
    if len(front) <= most:
        return list(front)
    logs = [math.log(points[i][0]) for i in front]
    low, high = logs[0], logs[-1]
    wanted = [low + (high - low) * k / (most - 1) for k in range(most)]
    nearest = {min(range(len(front)), key=lambda j: abs(logs[j] - w)) for w in wanted}
    return [front[j] for j in sorted(nearest)]
