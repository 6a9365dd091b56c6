"""Pictures of the kernel table: speed-up against n, share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duotone.report.kernels import best_known, rows_of, shape_title

Row = Mapping[str, Any]
BEST_16_BIT = "best 16-bit"
# Colour by implementation, in the roofline.
COLOURS = {"cuda": "tab:green", "triton": "tab:blue", "reference": "tab:gray", None: "tab:orange"}


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_speedups(result: Row, path: Path) -> None:
    """Speed-up over the best 16-bit row against n: a panel per heads and head_dim with several n.

    The fastest implementation of each scheme; where one n has several batches, the largest.
    """
    families = _families(result)
    figure = _figure(2.5 + 6 * min(2, len(families)), 4.8 * -(-len(families) // 2))
    grid = figure.subplots(-(-len(families) // 2), min(2, len(families)), squeeze=False)
    panels = list(grid.flat)
    for axes, (key, shapes) in zip(panels, families.items(), strict=False):
        _draw_family(axes, result, shapes)
        q_heads, kv_heads, head_dim = key
        axes.set_title(f"heads {q_heads}/{kv_heads}, d {head_dim}", loc="left")
    for axes in panels[len(families) :]:
        axes.set_visible(False)
    lines = [line for axes in panels for line in axes.get_lines()]
    handles = {line.get_label(): line for line in lines if line.get_label() != BEST_16_BIT}
    figure.legend(
        handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=8
    )
    title = f"decode attention on {result['device']}, speed-up over the best 16-bit backend"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(path)


def _families(result: Row) -> dict[tuple[int, int, int], list[Row]]:
    """{(q_heads, kv_heads, head_dim): shapes}; families with one n only if none has more."""
    families: dict[tuple[int, int, int], list[Row]] = {}
    for shape in result["shapes"]:
        key = (shape["q_heads"], shape["kv_heads"], shape["head_dim"])
        families.setdefault(key, []).append(shape)
    long = {k: shapes for k, shapes in families.items() if len({s["tokens"] for s in shapes}) > 1}
    return long or families


def _draw_family(axes: Any, result: Row, shapes: list[Row]) -> None:
    from matplotlib import colormaps

    names = list(dict.fromkeys(row["row"] for row in result["rows"] if row["impl"]))
    for place, name in enumerate(names):
        points = _points(result, shapes, name)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker="os^Dv"[place % 5],
                ms=4,
                lw=1,
                color=colormaps["tab20"](place % 20),
                label=name,
            )
    batches = {s["tokens"]: s["batch"] for s in sorted(shapes, key=lambda s: s["batch"])}
    labels = [f"{n:,}\nB {batch}" for n, batch in batches.items()]
    axes.axhline(1, color="0.5", lw=1, ls=":", label=BEST_16_BIT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(batches), labels)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_xlabel("n (tokens per sequence), batch")
    axes.set_ylabel("speed-up, rotated")
    axes.grid(True, color="0.92")


def _points(result: Row, shapes: list[Row], name: str) -> list[tuple[int, float]]:
    """(n, speed-up), n rising."""
    found: dict[int, float] = {}
    for shape in sorted(shapes, key=lambda shape: shape["batch"]):
        speedups = [
            best_known(row["speedup"])
            for row in rows_of(result, shape)
            if row["row"] == name and row["impl"] and row["status"] == "ok"
        ]
        known = [speedup for speedup in speedups if speedup is not None]
        if known:
            found[shape["tokens"]] = max(known)
    return sorted(found.items())


def draw_roofline(result: Row, path: Path) -> None:
    """Share of the copy bandwidth of every row: one panel per shape."""
    shapes = [s for s in result["shapes"] if _timed(result, s)]
    longest = max((len(_timed(result, shape)) for shape in shapes), default=1)
    columns = min(3, max(1, len(shapes)))
    lines = -(-len(shapes) // columns) or 1
    figure = _figure(5 * columns, lines * (1.2 + 0.16 * longest))
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, shape in zip(panels, shapes, strict=False):
        _draw_shares(axes, _timed(result, shape))
        axes.set_title(shape_title(shape), loc="left", fontsize=9)
    for axes in panels[len(shapes) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"bytes read per second over the copy bandwidth of {result['copy_tb_per_s']:.2f} TB/s, "
        f"rotated; {result['device']}"
    )
    figure.savefig(path)


def _timed(result: Row, shape: Row) -> list[Row]:
    return [row for row in rows_of(result, shape) if row["status"] == "ok"]


def _draw_shares(axes: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    shares = [100 * best_known(row["share_of_copy"]) for row in rows]
    axes.barh(places, shares, color=[COLOURS[row["impl"]] for row in rows], height=0.75)
    axes.set_yticks(places, [_label(row) for row in rows], fontsize=6)
    axes.invert_yaxis()
    axes.axvline(100, color="0.4", lw=1, ls=":")
    axes.set_xlabel("% of the copy bandwidth", fontsize=8)
    axes.grid(True, axis="x", color="0.92")
    axes.set_axisbelow(True)


def _label(row: Row) -> str:
    return f"{row['row']}, {row['impl']}" if row["impl"] else row["row"]
