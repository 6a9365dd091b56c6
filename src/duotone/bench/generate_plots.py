"""The picture of `duotone bench generate`: ms per token and gigabytes, plain against `enable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.report.generate import STATIC, ordered, summarized

Result = Mapping[str, Any]
PANEL_INCHES, LOAD_INCHES, BAR = (4.6, 3.2), 2.0, 0.27
COLORS = {"plain": "0.6", STATIC: "0.8", "enable": "C0"}


def draw_generate(results: Sequence[Result], path: Path) -> None:
    """Bars per load without padding: ms per token, and gigabytes of the cache.

    Errors: ValueError where no result has both a plain row and one of `enable`.
    """
    from matplotlib.figure import Figure

    even = [result for result in ordered(results) if not result["load"]["padded"]]
    found = [one for result in even if (one := summarized(result))]
    if not found:
        raise ValueError("a picture needs a plain row and one of enable; got none.")
    width, height = PANEL_INCHES
    width = max(width, LOAD_INCHES * len(found))
    figure = Figure((2 * width, height), dpi=150, layout="constrained")
    times, sizes = figure.subplots(1, 2)
    _bars(times, found, {"plain": 0, STATIC: 1, "enable": 2}, "ms", "{:.1f}")
    _bars(sizes, found, {"plain": 0, "enable": 1}, "gb", "{:.2f}")
    times.set_ylabel("ms per token")
    sizes.set_ylabel("GB of the cache")
    handles, names = times.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path)


def _bars(
    axis: Any, found: Sequence[Mapping[str, Any]], bars: Mapping[str, int], key: str, form: str
) -> None:
    """A bar of each name per load; what was not measured has none."""
    bars = {name: i for name, i in bars.items() if any(one[key][i] is not None for one in found)}
    for place, (name, index) in enumerate(bars.items()):
        shift = (place - (len(bars) - 1) / 2) * BAR
        points = [(at, one[key][index]) for at, one in enumerate(found)]
        points = [(at + shift, height) for at, height in points if height is not None]
        drawn = axis.bar(*zip(*points, strict=True), BAR, color=COLORS[name], label=name)
        axis.bar_label(drawn, fmt=form, fontsize="small")
    axis.set_xticks(range(len(found)), [_tick(one) for one in found], fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _tick(summary: Mapping[str, Any]) -> str:
    """A load on lines of its own: the model, batch and tokens, the scheme."""
    model, _, load = summary["title"].partition(" (")
    return f"{model}\n{load.partition('), ')[2]}\n{summary['row']}"
