"""The Pareto front as a picture: held-out divergence against true bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHOSEN, FRONT = "chosen", "front "
# Points nearer than this share one label.
TOO_NEAR = 0.75


def need_matplotlib() -> None:
    """Raise ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib, which is not installed: pip install 'duotone[tune]', or "
            "leave the plot out with --no-plot"
        ) from error


def draw_front(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: the front's points, the chosen one, every known scheme by name.

    A fainter line joins the best of the trials on the search's own samples.
    """
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_trials(axes, report)
    _draw_points(axes, report)
    _draw_budget(axes, report)
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
    figure.savefig(path)


def _draw_trials(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw every measured trial by its numbers on the search's samples."""
    bits, kl = zip(*((t["bits"], t["kl"]) for t in report["search"]), strict=True)
    axes.scatter(bits, kl, s=6, color="0.8", label="trials, on the search's samples", zorder=1)


def _draw_points(axes: Any, report: Mapping[str, Any]) -> None:
    numbers, published = report["heldout"], report["published"]

    def xy(labels: list[str]) -> tuple[list[float], list[float]]:
        ordered = sorted((numbers[label]["bits"], numbers[label]["kl"]) for label in labels)
        return [p[0] for p in ordered], [p[1] for p in ordered]

    front = [label for label in numbers if label.startswith(FRONT)]
    ours = [n for n in numbers if n not in published and n != CHOSEN and n not in front]
    axes.plot(*xy(front), "o-", ms=4, color="tab:blue", label="front found, held out", zorder=2)
    axes.plot(*xy(published), "s", ms=5, color="tab:red", label="published, held out", zorder=3)
    if ours:
        axes.plot(*xy(ours), "D", ms=5, color="tab:orange", label="shipped presets", zorder=3)
    axes.plot(*xy([CHOSEN]), "*", ms=15, color="tab:green", label="chosen", zorder=4)
    for place, names in _by_place(numbers, [*published, *ours]).items():
        text = "\n".join(names)
        axes.annotate(text, place, xytext=(5, 4), textcoords="offset points", fontsize=7)


def _by_place(numbers: Mapping[str, Any], labels: list[str]) -> dict[tuple[float, float], list]:
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


def _draw_budget(axes: Any, report: Mapping[str, Any]) -> None:
    bits = report["budget"]["bits"]
    axes.axvline(bits, color="tab:green", lw=1, ls=":", label=f"budget, {bits:.2f} bits", zorder=1)
