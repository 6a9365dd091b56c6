"""Pictures of calibrated bases: spectra of all layers, gains and bits by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
TITLES = {"key": "K", "value": "V"}
COLOURS = {"key": "tab:blue", "value": "tab:orange"}
# Eigenvalues below this share of a panel's largest one are numerical zeros.
LEAST = 1e-8


def rows_of(report: Report, which: str) -> list[Mapping[str, Any]]:
    """The rows of "key" or "value", layer by layer."""
    return [row for row in report["layers"] if row["which"] == which]


def draw_spectra(report: Report) -> Any:
    """A figure of two panels, K and V: eigenvalues by rank on a log scale, a line per layer."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure((11, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    depth = len(rows_of(report, "key"))
    scale = ScalarMappable(Normalize(0, max(depth - 1, 1)), colormaps["viridis"])
    for axes, which in zip(panels, TITLES, strict=True):
        rows = rows_of(report, which)
        for row in rows:
            ranks = range(1, len(row["spectrum"]) + 1)
            colour = scale.to_rgba(row["layer"])
            axes.plot(ranks, row["spectrum"], color=colour, lw=1.2)
        axes.set_yscale("log")
        axes.set_title(f"{TITLES[which]}, effective rank {_range(rows)}", loc="left")
        axes.set_xlabel("coefficient, by falling variance")
        axes.grid(True, color="0.92")
    _bound(panels[0], report["layers"])
    panels[0].set_ylabel("variance, as squared error\nof the attention's output")
    ticks = range(0, depth, max(1, -(-depth // 8)))
    figure.colorbar(scale, ax=panels, label="layer", ticks=list(ticks), pad=0.01)
    header = report["header"]
    title = f"{header['model']}: spectra of K and V, head_dim {header['head_dim']}"
    figure.suptitle(f"{title}, {header['tokens']:,} tokens", x=0.01, ha="left", fontsize=10)
    return figure


def _range(rows: Sequence[Mapping[str, Any]]) -> str:
    ranks = [row["effective_rank"] for row in rows]
    return f"{min(ranks):.1f} to {max(ranks):.1f}"


def _bound(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Leave numerical zeros out of the picture."""
    numbers = [x for row in rows for x in row["spectrum"] if x > 0]
    if numbers:
        top = max(numbers)
        axes.set_ylim(max(min(numbers), LEAST * top) / 2, 2 * top)


def draw_gains(report: Report) -> Any:
    """A figure of two panels: expected gain, and the bits that the allocation gives, by layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure((9, 5.4), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, name in ((upper, "gain"), (lower, "bits")):
        for side, which in zip((-1, 1), TITLES, strict=True):
            rows = rows_of(report, which)
            places = [row["layer"] + 0.2 * side for row in rows]
            heights = [row[name] for row in rows]
            axes.bar(places, heights, 0.38, color=COLOURS[which], label=TITLES[which])
        axes.grid(True, axis="y", color="0.92")
        axes.set_axisbelow(True)
    total = report["total"]
    upper.axhline(1, color="0.4", lw=1, ls=":")
    upper.axhline(total["gain"], color="0.2", lw=1, ls="--", label="all layers, one budget")
    upper.set_ylabel("expected error,\nplain / calibrated")
    lower.axhline(total["bits"], color="0.2", lw=1, ls="--")
    lower.set_ylabel("code bits\nper number")
    lower.set_xlabel("layer")
    lower.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    upper.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    title = f"{report['header']['model']}: gain at the same code bits"
    upper.set_title(f"{title}, {total['bits']:.2f} in the mean", loc="left", fontsize=10)
    return figure
