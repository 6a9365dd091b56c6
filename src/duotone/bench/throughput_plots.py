"""Pictures of throughput: tokens per second against the budget, and shares of the roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
PANEL_INCHES = (5.2, 3.6)
# Budgets that make a line.
MIN_POINTS, COLUMNS, LEGEND_COLUMNS = 3, 2, 3


def draw_throughput(results: Sequence[Result], path: Path) -> None:
    """Decode throughput of every row against the budget; dashed: at the roofline's time."""
    _draw(results, path, "tokens/s", lambda r: r["decode_tokens_per_s"], _at_roofline)


def draw_shares(results: Sequence[Result], path: Path) -> None:
    """Draw every row's share of the roofline's speed, in per cent."""
    _draw(results, path, "% of the roofline", lambda r: 100 * r["roofline_share"])


def _at_roofline(result: Result) -> float:
    return result["batch"] / result["roofline_s"]


def _draw(
    results: Sequence[Result],
    path: Path,
    label: str,
    number: Callable[[Result], float],
    limit: Callable[[Result], float] | None = None,
) -> None:
    """A panel for every model and number of visual tokens.

    Errors: ValueError where no row has enough budgets for a line.
    """
    from matplotlib.figure import Figure

    panels = _panels(results)
    if not panels:
        raise ValueError(f"a picture needs rows at {MIN_POINTS} budgets or more; got none.")
    width, height = PANEL_INCHES
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure((width * columns, height * lines), dpi=150, layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    names = sorted({name for rows in panels.values() for name in rows})
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, ((model, visual), rows) in zip(axes, panels.items(), strict=False):
        for name, line in sorted(rows.items()):
            budgets = [r["configuration"]["budget_bytes"] / 1e9 for r in line]
            color = f"C{names.index(name)}"
            axis.plot(budgets, [number(r) for r in line], "o-", color=color, label=name)
            if limit is not None:
                axis.plot(budgets, [limit(r) for r in line], "--", color=color, lw=0.8)
        axis.set(title=f"{model}, {visual} visual tokens", xlabel="GB for caches and activations")
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    handles = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    named = [handles[name] for name in names if name in handles]
    columns = min(len(named), LEGEND_COLUMNS)
    figure.legend(handles=named, loc="outside upper center", ncols=columns, frameon=False)
    figure.savefig(path)


def _panels(results: Sequence[Result]) -> dict[tuple[str, int], dict[str, list[Result]]]:
    """Results of each (model, visual tokens) and row, by budget."""
    panels: dict[tuple[str, int], dict[str, list[Result]]] = {}
    for result in sorted(results, key=lambda r: r["configuration"]["budget_bytes"]):
        at = result["configuration"]
        if result["batch"]:
            rows = panels.setdefault((result["model"]["name"], at["visual"]), {})
            rows.setdefault(at["row"], []).append(result)
    kept = {
        at: {name: line for name, line in rows.items() if len(line) >= MIN_POINTS}
        for at, rows in panels.items()
    }
    return {at: rows for at, rows in sorted(kept.items(), key=_size) if rows}


def _size(item: tuple[tuple[str, int], Any]) -> tuple[int, str, int]:
    """Small models first."""
    model, visual = item[0]
    return len(model), model, visual
