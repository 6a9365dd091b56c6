"""Pictures of schemes' errors in attention: histograms of scores, errors by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
# Share of scores on each side that may lie outside a panel: of exact scores, and of all others.
TAIL = 1e-3
EXACT, PLAIN, CALIBRATED = "0.72", "tab:blue", "tab:red"


def draw_scores(report: Report) -> Any:
    """A figure: a row per scheme, a column for the first, the middle and the last layer.

    Densities of q . k * sm_scale of the exact cache (filled) and from codes, the latter also after
    score calibration where a scheme has one.
    """
    from matplotlib.figure import Figure

    schemes = list(dict.fromkeys(entry["scheme"] for entry in report["errors"]))
    layers = chosen_layers(len(report["errors"][0]["layers"]))
    size = (3.6 * len(layers) + 0.6, 2.5 * len(schemes) + 0.6)
    figure = Figure(size, dpi=150, layout="constrained")
    grid = figure.subplots(len(schemes), len(layers), squeeze=False)
    for line, scheme in zip(grid, schemes, strict=True):
        entries = [entry for entry in report["errors"] if entry["scheme"] == scheme]
        for axes, layer in zip(line, layers, strict=True):
            _draw_layer(axes, entries, layer)
            axes.set_title(f"{scheme}, layer {layer}", loc="left", fontsize=9)
        line[0].set_ylabel("density", fontsize=8)
        line[-1].legend(frameon=False, fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("score before the softmax", fontsize=8)
    title = f"{report['header']['model']}: scores of the answers' queries"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def chosen_layers(depth: int) -> list[int]:
    """The first, the middle and the last layer."""
    return sorted({0, depth // 2, depth - 1})


def _draw_layer(axes: Any, entries: Sequence[Mapping[str, Any]], layer: int) -> None:
    rows = [entry["layers"][layer] for entry in entries]
    shown = [rows[0]["exact"], *(row["scores"] for row in rows)]
    axes.stairs(*density(shown[0]), fill=True, color=EXACT, label="16 bit")
    for entry, histogram in zip(entries, shown[1:], strict=True):
        colour, label = (PLAIN, "codes") if entry["tau"] is None else (CALIBRATED, "codes, tau")
        axes.stairs(*density(histogram), color=colour, lw=1.1, label=label)
    bounds = [central_range(histogram) for histogram in shown]
    axes.set_xlim(min(low for low, _ in bounds), max(high for _, high in bounds))
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="0.94")
    axes.set_axisbelow(True)


def density(histogram: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """(heights whose area is 1, edges), as `stairs` draws them."""
    start, width, counts = (histogram[name] for name in ("start", "width", "counts"))
    total = max(sum(counts), 1) * width
    return [n / total for n in counts], [start + i * width for i in range(len(counts) + 1)]


def central_range(histogram: Mapping[str, Any]) -> tuple[float, float]:
    """Edges between which all numbers but `TAIL` on each side lie."""
    counts, edges = histogram["counts"], density(histogram)[1]
    spare = TAIL * sum(counts)
    first = _bins_within(counts, spare)
    last = len(counts) - _bins_within(counts[::-1], spare)
    return edges[first], edges[last]


def _bins_within(counts: Sequence[int], spare: float) -> int:
    """Number of bins from the front that hold at most `spare` together."""
    below = 0
    for place, count in enumerate(counts):
        below += count
        if below > spare:
            return place
    return 0


def _percent(share: float, _: int) -> str:
    """Labels 1, 2 and 5 of a decade."""
    digit = f"{share:.0e}"[0]
    return f"{100 * share:.3g} %" if digit in "125" else ""


def draw_errors(report: Report) -> Any:
    """A figure of two panels on log scales: errors of weights and of outputs by layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure((11, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    names = {
        "weights_mse": "MSE of the attention weights",
        "output_error": "error of the outputs, share of their norm",
    }
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for place, entry in enumerate(report["errors"]):
            numbers = [row[name] or float("nan") for row in entry["layers"]]
            style = {"color": f"C{place % 10}", "marker": "os^Dv"[place % 5], "ms": 4, "lw": 1.2}
            axes.plot(numbers, label=entry["label"], **style)
        axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, which="major", color="0.9")
    for set_formatter in (panels[1].yaxis.set_major_formatter, panels[1].yaxis.set_minor_formatter):
        set_formatter(_percent)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    samples = report["errors"][0]["layers"][0]["samples"]
    title = f"{report['header']['model']}: attention through the cache, mean over {samples} samples"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure
