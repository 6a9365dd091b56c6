"""Pictures of results: one function each, from a result to a figure of matplotlib.

`duotone tune` and `duotone inspect` draw their reports. matplotlib is imported when a picture is
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
# Names and colours of tensors.
BY_TENSOR = {"key": ("K", "tab:blue"), "value": ("V", "tab:orange")}
# Eigenvalues below this share of a panel's largest one are numerical zeros.
LEAST = 1e-8
# Points of a front nearer than this share one label.
TOO_NEAR = 0.75


def need_matplotlib(extra: str = "plot", otherwise: str = "") -> None:
    """Raise ImportError with the remedy if matplotlib is missing.

    extra: of duotone, to install. otherwise: how to do without pictures.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: "
            f"pip install 'duotone[{extra}]'{otherwise}"
        ) from error


def figure(width: float, height: float, title: str = "") -> Any:
    """An empty figure of this size in inches, whose title stands at the left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    if title:
        made.suptitle(title, x=0.01, ha="left", fontsize=10)
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


# The report of `duotone tune`


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


# The report of `duotone inspect`


def spectra(report: Result) -> Any:
    """Two panels, K and V: eigenvalues by rank on a log scale, a line per layer."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    header, depth = report["header"], len(layers_of(report, "key"))
    title = f"{header['model']}: spectra of K and V, head_dim {header['head_dim']}"
    made = figure(11, 4.2, f"{title}, {header['tokens']:,} tokens")
    found = panels(made, 2, 2, sharey=True)
    scale = ScalarMappable(Normalize(0, max(depth - 1, 1)), colormaps["viridis"])
    for axes, (which, (name, _)) in zip(found, BY_TENSOR.items(), strict=True):
        rows = layers_of(report, which)
        for row in rows:
            ranks = range(1, len(row["spectrum"]) + 1)
            axes.plot(ranks, row["spectrum"], color=scale.to_rgba(row["layer"]), lw=1.2)
        effective = [row["effective_rank"] for row in rows]
        axes.set_yscale("log")
        axes.set_title(
            f"{name}, effective rank {min(effective):.1f} to {max(effective):.1f}", loc="left"
        )
        axes.set_xlabel("coefficient, by falling variance")
        axes.grid(True, color="0.92")
    numbers = [x for row in report["layers"] for x in row["spectrum"] if x > 0]
    if numbers:
        top = max(numbers)
        found[0].set_ylim(max(min(numbers), LEAST * top) / 2, 2 * top)
    found[0].set_ylabel("variance, as squared error\nof the attention's output")
    ticks = list(range(0, depth, max(1, -(-depth // 8))))
    made.colorbar(scale, ax=found, label="layer", ticks=ticks, pad=0.01)
    return made


def layers_of(report: Result, which: str) -> list[Result]:
    """The rows of "key" or "value", layer by layer."""
    return [row for row in report["layers"] if row["which"] == which]


def gains(report: Result) -> Any:
    """Two panels: expected gain, and the bits that the allocation gives, by layer."""
    from matplotlib.ticker import MaxNLocator

    made, total = figure(9, 5.4), report["total"]
    upper, lower = made.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, number in ((upper, "gain"), (lower, "bits")):
        for side, (which, (name, colour)) in zip((-1, 1), BY_TENSOR.items(), strict=True):
            rows = layers_of(report, which)
            places = [row["layer"] + 0.2 * side for row in rows]
            axes.bar(places, [row[number] for row in rows], 0.38, color=colour, label=name)
        axes.axhline(total[number], color="0.2", lw=1, ls="--")
        axes.grid(True, axis="y", color="0.92")
        axes.set_axisbelow(True)
    upper.lines[-1].set_label("all layers, one budget")
    upper.axhline(1, color="0.4", lw=1, ls=":")
    upper.set_ylabel("expected error,\nplain / calibrated")
    lower.set_ylabel("code bits\nper number")
    lower.set_xlabel("layer")
    lower.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    upper.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    title = f"{report['header']['model']}: gain at the same code bits"
    upper.set_title(f"{title}, {total['bits']:.2f} in the mean", loc="left", fontsize=10)
    return made
