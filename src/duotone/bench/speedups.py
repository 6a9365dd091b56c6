"""Numbers derived from times: TB/s, shares of the copy bandwidth, speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duotone.bench.timing import METHODS


def with_speedups(rows: Sequence[Mapping[str, Any]], copy: float) -> list[dict]:
    """Rows with TB/s, shares of the copy bandwidth and speed-ups, by method.

    speedup: over the fastest 16-bit row of the same shape by the same method, which `best` names.
    """
    return [_with_speedup(row, rows, copy) if row["status"] == "ok" else dict(row) for row in rows]


def _with_speedup(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], copy: float
) -> dict[str, Any]:
    speed, share, speedup, best = {}, {}, {}, {}
    for method in METHODS:
        us = row["us"][method]
        fastest = best_16_bit(rows, row["shape"], method)
        best[method] = fastest and fastest["row"]
        speed[method] = us and row["bytes"]["total"] / us / 1e6
        share[method] = us and speed[method] / copy
        speedup[method] = fastest["us"][method] / us if us and fastest else None
    return {**row, "tb_per_s": speed, "share_of_copy": share, "speedup": speedup, "best": best}


def best_16_bit(
    rows: Sequence[Mapping[str, Any]], shape: Mapping[str, int], method: str
) -> Mapping[str, Any] | None:
    """The fastest 16-bit row of a shape by one method, if there is one."""
    here = [
        row
        for row in rows
        if row["shape"] == shape and row["status"] == "ok" and row["kind"] == "16-bit"
    ]
    timed = [row for row in here if row["us"][method]]
    return min(timed, key=lambda row: row["us"][method], default=None)
