"""Pictures of results: one function each, from a result to a figure of matplotlib.

`duotone tune` draws its report, benchmarks/ this repository's results. matplotlib is imported when
a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
# Points of a front nearer than this share one label.
TOO_NEAR = 0.75


def figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    return made


def panels(made: Any, count: int, columns: int, **shared: Any) -> list[Any]:
    """`count` panels in lines of at most `columns`; the rest of the last line stays empty."""
    columns = max(1, min(columns, count))
    lines = max(1, -(-count // columns))
    found = list(made.subplots(lines, columns, squeeze=False, **shared).flat)
    for axes in found[count:]:
        axes.set_visible(False)
    return found[:count]


def legend(made: Any, axes: Sequence[Any], place: str, columns: int = 1) -> None:
    """One legend of all panels outside of them, each label once."""
    named: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    loc = f"outside {place}"
    made.legend(named.values(), named, loc=loc, ncols=columns, frameon=False, fontsize=8)


def front(report: Result) -> Any:
    """Held-out divergence against true bits: the front, the chosen point, known schemes by name.

    Pale points are the trials on the search's own samples.
    """
    made = figure(9, 6)
    axes = made.add_subplot()
    bits, kl = zip(*((t["bits"], t["kl"]) for t in report["search"]), strict=True)
    axes.scatter(bits, kl, s=6, color="0.8", label="trials, on the search's samples", zorder=1)
    _draw_points(axes, report["heldout"], report["published"])
    budget = report["budget"]["bits"]
    axes.axvline(
        budget, color="tab:green", lw=1, ls=":", label=f"budget, {budget:.2f} bits", zorder=1
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(lambda bits, _: f"{bits:g}")
    of = "visual number" if report["budget"]["of"] == "visual" else "number of the cache"
    axes.set_xlabel(f"true bits per {of}, every byte counted")
    axes.set_ylabel("KL(16-bit || cache) on held-out samples, nats (geometric mean of tasks)")
    tasks = ", ".join(part["task"] for part in report["settings"]["tasks"])
    axes.set_title(f"{report['settings']['model']['name']}: {tasks}", loc="left")
    axes.grid(True, which="major", color="0.9")
    axes.legend(frameon=False)
    return made


def _draw_points(axes: Any, numbers: Mapping[str, Result], published: list[str]) -> None:
    def xy(labels: list[str]) -> tuple[list[float], list[float]]:
        points = sorted((numbers[label]["bits"], numbers[label]["kl"]) for label in labels)
        return [p[0] for p in points], [p[1] for p in points]

    found = [label for label in numbers if label.startswith("front ")]
    ours = [n for n in numbers if n not in published and n != "chosen" and n not in found]
    axes.plot(*xy(found), "o-", ms=4, color="tab:blue", label="front found, held out", zorder=2)
    axes.plot(*xy(published), "s", ms=5, color="tab:red", label="published, held out", zorder=3)
    if ours:
        axes.plot(*xy(ours), "D", ms=5, color="tab:orange", label="shipped presets", zorder=3)
    axes.plot(*xy(["chosen"]), "*", ms=15, color="tab:green", label="chosen", zorder=4)
    for place, names in by_place(numbers, [*published, *ours]).items():
        text = "\n".join(names)
        axes.annotate(text, place, xytext=(5, 4), textcoords="offset points", fontsize=7)


def by_place(numbers: Mapping[str, Result], labels: list[str]) -> dict[tuple[float, float], list]:
    """Labels of points too near to tell apart, together at the first point."""
    places: dict[tuple[float, float], list[str]] = {}
    for label in labels:
        here = (numbers[label]["bits"], numbers[label]["kl"])
        near = (p for p in places if _distance(p, here) < TOO_NEAR)
        places.setdefault(next(near, here), []).append(label)
    return places


def _distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Distance in halves of a decade of KL or quarters of an octave of bits, the larger of both."""
    octaves = abs(math.log2(one[0] / other[0])) * 4
    decades = abs(math.log10(max(one[1], 1e-9) / max(other[1], 1e-9))) * 2
    return max(octaves, decades)
