"""`duotone bench kernel`: check every row on a small shape, then time it on the large ones.

A wrong row is never timed. A row that cannot run, fails or comes too late states the reason, and
the table goes on. Speed-ups are over the best 16-bit row of the same shape by the same method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from duotone.bench.baselines import BASELINES, UnavailableError, quiet
from duotone.bench.packing import packing_rows
from duotone.bench.paged_steps import step_rows
from duotone.bench.row_bench import MIN_REPEATS, RowBench, WrongResultError, first_line
from duotone.bench.rows import COMPILED_STAGE, IMPLS, DenseRow, PackedRow, Row
from duotone.bench.schemes import BenchScheme, bench_schemes
from duotone.bench.shapes import SHAPES, Shape
from duotone.bench.speedups import with_speedups
from duotone.bench.timing import Clock, Deadline, copy_tb_per_s
from duotone.report.provenance import stamp

SCHEMA = "duotone.kernels/1"
METHOD = (
    "medians; do_bench: triton.testing.do_bench of a captured graph; clean: one launch, direct or "
    "as a graph, L2 flushed by reading; rotated: per launch of a graph over several buffers"
)
TABLES = ("decode", "pack", "step")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """Choice of measurements.

    minutes: no row is started later; None: all rows. repeats: most launches per method.
    slow_starters: also backends that start with long compilations. tables: `TABLES`.
    """

    shapes: Sequence[Shape] = SHAPES
    schemes: Sequence[BenchScheme] = ()
    impls: Sequence[str] = ("cuda", "triton")
    minutes: float | None = None
    repeats: int = 50
    slow_starters: bool = True
    tables: Sequence[str] = ("decode",)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.impls) - set(IMPLS))
        missing = sorted(set(self.tables) - set(TABLES))
        if missing or not self.tables:
            raise ValueError(f"--table must be among {list(TABLES)}; got {missing or 'none'}")
        if unknown or not self.impls:
            raise ValueError(f"--impl must be among {list(IMPLS)}; got {unknown or 'none'}")
        if self.repeats < MIN_REPEATS:
            raise ValueError(f"repeats must be at least {MIN_REPEATS}; got {self.repeats}")

    def quick(self) -> Settings:
        """The first shape, few repeats, nothing that compiles for long."""
        return replace(self, shapes=self.shapes[:1], repeats=10, slow_starters=False)


def run_kernels(settings: Settings, clock: Clock, progress: Progress | None = None) -> dict:
    """Run all tables; returns one JSON-safe result of schema `duotone.kernels/1`."""
    deadline = Deadline(clock, settings.minutes)
    report = progress or (lambda what, done, total: None)
    result: dict[str, Any] = {"schema": SCHEMA, **stamp(clock.device), **_settings(settings)}
    result["versions"] |= {"cuda": torch.version.cuda or "none"}
    result["copy_tb_per_s"] = copy_tb_per_s(clock)
    result["rows"] = []
    if "decode" in settings.tables:
        rows = decode_rows(settings, clock, deadline, report)
        result["rows"] = with_speedups(rows, result["copy_tb_per_s"])
    for name, rows_of in (("pack", packing_rows), ("step", step_rows)):
        wanted = name in settings.tables
        result[name] = _others(rows_of, settings, clock, deadline, report) if wanted else None
    return result


def _others(
    rows_of: Callable[..., dict[str, Any]],
    settings: Settings,
    clock: Clock,
    deadline: Deadline,
    progress: Progress,
) -> dict[str, Any]:
    """The table of packing or steps, or the reason for none: earlier measurements are not lost."""
    try:
        return rows_of(clock, deadline, settings.repeats, progress)
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def failures(result: Mapping[str, Any]) -> list[str]:
    """Lines for wrong and failed rows; not for rows that are unavailable or too late."""
    lines = [
        f"{row['row']} ({row['impl'] or row['kind']}): {row['status']}, {row['reason']}"
        for row in result["rows"]
        if row["status"] in ("wrong", "failed")
    ]
    for name, title in (("pack", "packing"), ("step", "steps on pages")):
        table = result[name]
        if table is not None and table["status"] != "ok":
            lines.append(f"{title}: {table['reason']}")
    return lines


def _settings(settings: Settings) -> dict[str, Any]:
    return {
        "method": METHOD,
        "minutes": settings.minutes,
        "repeats": settings.repeats,
        "impls": list(settings.impls),
        "shapes": [asdict(shape) for shape in settings.shapes],
        "schemes": [_plain(scheme) for scheme in settings.schemes or bench_schemes()],
    }


def _plain(scheme: BenchScheme) -> dict[str, Any]:
    """Convert to JSON types: lists for tuples."""
    return json.loads(json.dumps(asdict(scheme)))


def decode_rows(
    settings: Settings, clock: Clock, deadline: Deadline, progress: Progress
) -> list[dict]:
    """All rows of all shapes, measured stage by stage, in the order of the table."""
    rows = table_rows(settings.schemes or bench_schemes(), settings.impls)
    wanted = [row for row in rows if settings.slow_starters or row.stage != COMPILED_STAGE]
    jobs = [(shape, row) for shape in settings.shapes for row in wanted]
    order = sorted(range(len(jobs)), key=lambda i: jobs[i][1].stage)
    bench = RowBench(clock, settings.repeats)
    results: dict[int, dict] = {}
    for done, i in enumerate(order):
        shape, row = jobs[i]
        progress(f"{shape}: {row.name}", done, len(jobs))
        results[i] = describe(shape, row) | _outcome(bench, shape, row, deadline)
    progress("done", len(jobs), len(jobs))
    return [results[i] for i in range(len(jobs))]


def table_rows(schemes: Sequence[BenchScheme], impls: Sequence[str]) -> list[Row]:
    """Baselines, then every scheme by every implementation."""
    packed = [PackedRow(scheme, impl) for scheme in schemes for impl in impls]
    return [*(DenseRow(baseline) for baseline in BASELINES), *packed]


def describe(shape: Shape, row: Row) -> dict[str, Any]:
    """Fields that describe a row before it is measured."""
    kind = "packed" if row.impl else f"{row.bits:g}-bit"
    tau = isinstance(row, PackedRow) and row.scheme.tau is not None
    return {
        "shape": asdict(shape),
        "row": row.name,
        "impl": row.impl,
        "kind": kind,
        "nominal_bits": row.bits,
        "tau": tau,
    }


def _outcome(bench: RowBench, shape: Shape, row: Row, deadline: Deadline) -> dict[str, Any]:
    """The row's numbers, or the reason for none."""
    if deadline.passed:
        return {"status": "skipped", "reason": "the time was over (--minutes)"}
    try:
        with quiet():
            return {"status": "ok", **bench.run(shape, row)}
    except UnavailableError as error:
        return {"status": "unavailable", "reason": str(error)}
    except WrongResultError as error:
        return {"status": "wrong", "reason": str(error)}
    except torch.OutOfMemoryError as error:
        return {"status": "failed", "reason": f"out of memory: {first_line(error)}"}
    # Backends and compilers raise anything; a table of a hundred rows does not end with one.
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
