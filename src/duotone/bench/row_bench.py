"""One row: checked on a small shape, then timed on a large one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from duotone.attention import attend
from duotone.bench.baselines import UnavailableError
from duotone.bench.problems import Problem, copy_of
from duotone.bench.rows import Row
from duotone.bench.shapes import Shape
from duotone.bench.timing import Clock, measure, rotated_count

# Tokens of the check's sequences: no multiple of a kernel's tile.
CHECK_TOKENS = 784
CHECK_BATCH, CHECK_KV_HEADS = 2, 2
ROW_BUDGET_US = 4e5
MIN_REPEATS = 5


class WrongResultError(Exception):
    """Error of a row whose output is not the reference's."""


class RowBench:
    """Measures rows, each checked once per head_dim and group."""

    def __init__(self, clock: Clock, repeats: int) -> None:
        self.clock, self.repeats = clock, repeats
        self._checked: dict[tuple, dict[str, float]] = {}

    def run(self, shape: Shape, row: Row) -> dict[str, Any]:
        """Numbers of one row. Errors: UnavailableError, WrongResultError, errors of backends."""
        self.clock.release()
        first_use_s, check = self.check(shape, row)
        problem = row.lay_out(row.problem(shape, self.clock.device))
        run = row.call(problem)
        seconds, _ = self._first_call(row, run)
        # The memory of the problem's sources is free only after this.
        self.clock.release()
        copies = rotated_count(row.nbytes(problem).total, self.clock.free_bytes())
        more = [row.call(copy_of(problem)) for _ in range(copies - 1)]
        for one in more:
            one()
        times = measure([run, *more], self.clock, self._repeats(run))
        used = row.nbytes(problem)
        return {
            "us": times,
            "buffers": max(1, copies),
            "bytes": {**asdict(used), "total": used.total},
            "first_use_s": first_use_s + seconds,
            "check": check,
        }

    def check(self, shape: Shape, row: Row) -> tuple[float, dict[str, float]]:
        """(seconds of the first call, errors) on a small shape of the same head_dim and group."""
        key = (row.name, row.impl, shape.head_dim, shape.group)
        if key in self._checked:
            return 0.0, self._checked[key]
        small = Shape(
            CHECK_BATCH, CHECK_KV_HEADS * shape.group, CHECK_KV_HEADS, CHECK_TOKENS, shape.head_dim
        )
        problem = row.problem(small, self.clock.device)
        run = row.call(row.lay_out(problem))
        seconds, out = self._first_call(row, run)
        self._checked[key] = compare(
            out.reshape(problem.query.shape), reference(problem), row.tolerance
        )
        return seconds, self._checked[key]

    def _first_call(self, row: Row, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
        started = self.clock.now_s()
        out = self._call(row, run)
        self.clock.wait()
        return self.clock.now_s() - started, out

    def _call(self, row: Row, run: Callable[[], Tensor]) -> Tensor:
        """The output. Errors: UnavailableError where a foreign backend declines the shape."""
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if row.impl is None:
                raise UnavailableError(first_line(error)) from error
            raise

    def _repeats(self, run: Callable[[], Tensor]) -> int:
        """Number of launches that a row's share of the time allows."""
        us = max(1.0, self.clock.elapsed_us(run))
        return max(MIN_REPEATS, min(self.repeats, int(ROW_BUDGET_US / us)))


def reference(problem: Problem) -> Tensor:
    """`attention.reference` in fp64, rounded to the query's type."""
    query = problem.query.double()
    out = attend(query, problem.segments, sm_scale=problem.sm_scale, tau=problem.tau)
    return out.to(problem.query.dtype)


def compare(out: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> dict[str, float]:
    """Relative RMS and maximum error. Errors: WrongResultError beyond the tolerance."""
    if out.shape != expected.shape:
        raise WrongResultError(f"output {tuple(out.shape)} instead of {tuple(expected.shape)}")
    out, expected = out.double(), expected.double()
    error = out - expected
    rms = float(error.norm() / expected.norm())
    worst = float(error.abs().max() / expected.abs().max())
    if not (rms <= tolerance[0] and worst <= tolerance[1]):  # NaN is wrong as well.
        raise WrongResultError(
            f"relative RMS {rms:.2e} (at most {tolerance[0]:g}), maximum {worst:.2e} "
            f"(at most {tolerance[1]:g}) against the reference"
        )
    return {"rms": rms, "max": worst}


def first_line(error: Exception) -> str:
    """First line of an error, cut to a table's width."""
    return next(iter(str(error).splitlines()), "")
