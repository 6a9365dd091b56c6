"""Tables of `duotone bench kernel` (schema duotone.kernels/1)."""

from collections.abc import Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

# Methods of a result, and their names on a page.
METHODS = ("rotated", "clean", "do_bench")
NAMES = ("back-to-back", "isolated", "do_bench")
HEADER = ("K and V", "by", *(f"{name}, us" for name in NAMES), "MB", "TB/s", "of copy")
HEADER += (*(f"x {name}" for name in NAMES), "first use, s")


def shape_title(shape: Result) -> str:
    """'B 32, heads 32/8, n 8,192, d 128'"""
    heads = f"{shape['q_heads']}/{shape['kv_heads']}"
    return f"B {shape['batch']}, heads {heads}, n {shape['tokens']:,}, d {shape['head_dim']}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def best_known(numbers: Result) -> float | None:
    """The back-to-back number, or the isolated one where memory had no room for several buffers."""
    return numbers["rotated"] if numbers["rotated"] is not None else numbers["clean"]


def row_cells(row: Result) -> list[str]:
    """Cells of a measured row, under HEADER."""
    share = best_known(row["share_of_copy"])
    return [
        row["row"],
        row["impl"] or row["kind"],
        *(_number(row["us"][method], ".1f") for method in METHODS),
        f"{row['bytes']['total'] / 1e6:,.0f}",
        _number(best_known(row["tb_per_s"]), ".2f"),
        _number(share, ".0%").replace("%", " %"),
        *(_number(row["speedup"][method], ".2f") for method in METHODS),
        f"{row['first_use_s']:.1f}",
    ]


def rows_of(result: Result, shape: Result) -> list[dict[str, Any]]:
    """The rows of one shape."""
    return [row for row in result["rows"] if row["shape"] == shape]


def absent(result: Result, shape: Result) -> dict[tuple[str, str], list[str]]:
    """{(status, reason): rows} of those without a time."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows_of(result, shape):
        if row["status"] != "ok":
            name = f"{row['row']} ({row['impl']})" if row["impl"] else row["row"]
            found.setdefault((row["status"], row["reason"]), []).append(name)
    return found


def _notes(result: Result, shape: Result) -> str:
    lines = (
        f"- {status}, {reason}: {', '.join(names)}"
        for (status, reason), names in absent(result, shape).items()
    )
    return "\n".join(lines)


def _provenance(result: Result) -> str:
    return (
        f"*Device-to-device copy {result['copy_tb_per_s']:.2f} TB/s; medians of up to "
        f"{result['repeats']} launches; {source(result)}.*"
    )


def kernel_table(results: Sequence[Result]) -> str:
    """Every row of every shape, and the reasons of rows without a measurement."""
    parts = []
    for result in _with_rows(results):
        for shape in result["shapes"]:
            cells = [row_cells(row) for row in rows_of(result, shape) if row["status"] == "ok"]
            parts.append(f"**{shape_title(shape)}**")
            parts.append(markdown_table(HEADER, cells))
            notes = _notes(result, shape)
            parts += [notes] if notes else []
        parts.append(_provenance(result))
    return "\n\n".join(parts)


# What a reader wants first: a row per family of kernels, at the first shapes of a file.
SUMMARY = ("1 bit", "1 bit, tau", "2 bit", "4 bit", "kivi-2, window 128", "innerq-2, windows 128")
SUMMARY += ("duotone, front", "duotone, back", "duotone, 2 bit, front", "duotone, 2 bit, back")
SUMMARY += ("duotone-whole", "transform coded, 1 bit")
SUMMARY_SHAPES = 3


def kernel_summary(results: Sequence[Result]) -> str:
    """`kernel_speedups` with the rows of SUMMARY, at the first SUMMARY_SHAPES shapes."""
    return kernel_speedups(results, SUMMARY, SUMMARY_SHAPES)


def kernel_speedups(
    results: Sequence[Result], names: Sequence[str] | None = None, shapes: int | None = None
) -> str:
    """Speed-up of our best over the best 16-bit row by scheme and shape, back-to-back / isolated.

    names: the rows, those that a result has; all without it. shapes: how many; all without it.
    """
    parts = []
    for result in _with_rows(results):
        mine = [s for s in result["shapes"] if any(r["impl"] for r in rows_of(result, s))][:shapes]
        known = dict.fromkeys(row["row"] for row in result["rows"] if row["impl"])
        kept = known if names is None else [name for name in names if name in known]
        rows = [[name, *(_best_cell(result, shape, name) for shape in mine)] for name in kept]
        titles = f"x over the best 16-bit, {' / '.join(NAMES[:2])}"
        header = [titles, *map(shape_title, mine)]
        parts += [markdown_table(header, rows), _provenance(result)]
    return "\n\n".join(parts)


def _with_rows(results: Sequence[Result]) -> list[Result]:
    """Results without files that hold the table of packing alone."""
    return [result for result in results if result["rows"]]


def _best_cell(result: Result, shape: Result, name: str) -> str:
    """The fastest implementation of a row."""
    mine = [r for r in rows_of(result, shape) if r["row"] == name and r["impl"]]
    timed = [row for row in mine if row["status"] == "ok"]
    if not timed:
        return "wrong" if any(row["status"] == "wrong" for row in mine) else ""
    best = min(timed, key=lambda row: best_known(row["us"]))
    speedups = (_number(best["speedup"][method], ".2f") or "-" for method in METHODS[:2])
    return f"{' / '.join(speedups)} ({best['impl']})"


def packing_table(results: Sequence[Result]) -> str:
    """Packing by kernels against a copy of K and V, and hybrid against symmetric groups."""
    parts = []
    for result in results:
        table = result.get("pack")
        if table is None or table["status"] != "ok":
            continue
        header = ["batch, kv heads, n", "row", "us", "over a copy", "MB written"]
        parts += ["Back-to-back us:", markdown_table(header, map(_packing_cells, table["rows"]))]
        parts += [line for line in map(_hybrid_line, _by_shape(table["rows"])) if line]
        parts += [f"Larger shapes are missing: {table['stopped']}."] if table["stopped"] else []
        parts.append(_provenance(result))
    return "\n\n".join(parts) or "Packing was not measured."


def step_table(results: Sequence[Result]) -> str:
    """A layer's decode step on pages: appending new tokens, attention, and both."""
    parts = []
    for result in results:
        table = result.get("step")
        if table is None or table["status"] != "ok":
            continue
        header = ["batch, kv heads, n", "row", "us", "MB", "TB/s"]
        parts += ["Back-to-back us:", markdown_table(header, map(_step_cells, table["rows"]))]
        parts += [f"Larger shapes are missing: {table['stopped']}."] if table["stopped"] else []
        parts.append(_provenance(result))
    return "\n\n".join(parts) or "Steps on pages were not measured."


def _step_cells(row: Result) -> list[str]:
    us, tb_per_s = best_known(row["us"]), best_known(row["tb_per_s"])
    cells = [_packed_shape(row), row["row"], _number(us, ".1f"), f"{row['bytes'] / 1e6:,.1f}"]
    return [*cells, _number(tb_per_s, ".2f")]


def _packing_cells(row: Result) -> list[str]:
    us, over_copy = best_known(row["us"]), best_known(row["over_copy"])
    cells = [_packed_shape(row), row["row"], _number(us, ".1f"), _number(over_copy, ".2f")]
    return [*cells, f"{row['written_bytes'] / 1e6:,.1f}"]


def _packed_shape(row: Result) -> str:
    return "{batch}, {kv_heads}, {tokens:,}".format(**row["shape"])


def _by_shape(rows: Sequence[Result]) -> list[list[Result]]:
    shapes = dict.fromkeys(map(_packed_shape, rows))
    return [[row for row in rows if _packed_shape(row) == shape] for shape in shapes]


def _hybrid_line(rows: Sequence[Result]) -> str:
    us = {row["row"]: best_known(row["us"]) for row in rows}
    hybrid, symmetric = us.get("innerq-2 hybrid"), us.get("innerq-2 symmetric")
    if not hybrid or not symmetric:
        return ""
    return f"{_packed_shape(rows[0])}: hybrid / symmetric {hybrid / symmetric:.2f}"
