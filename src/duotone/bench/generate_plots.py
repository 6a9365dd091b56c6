"""Picture of `duotone bench generate`: ms per token and gigabytes, plain against `enable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
PANEL_INCHES, WIDTH = (4.2, 3.0), 0.38
PLAIN, COLORS = "plain", ("0.65", "C0")


def draw_generate(results: Sequence[Result], path: Path) -> None:
    """Two panels, a pair of bars for every load: plain, and the file's first scheme.

    Errors: ValueError where no file has both rows.
    """
    from matplotlib.figure import Figure

    pairs = [pair for result in _ordered(results) if (pair := _pair(result)) is not None]
    if not pairs:
        raise ValueError(f"a picture needs the row {PLAIN!r} and one of a scheme; got neither.")
    width, height = PANEL_INCHES
    figure = Figure((2 * width, height), dpi=150, layout="constrained")
    ours = pairs[0][1]["row"]
    panels = (
        ("ms per token", lambda plain, own: (plain["ms_per_token"], own["ms_per_token"])),
        ("GB of cache", lambda _, own: (own["cache_bytes_16_bit"] / 1e9, own["cache_bytes"] / 1e9)),
    )
    for axis, (label, numbers) in zip(figure.subplots(1, 2), panels, strict=True):
        for side, name in enumerate((PLAIN, f"enable, {ours}")):
            heights = [numbers(plain, own)[side] for plain, own, _ in pairs]
            places = [i + (side - 0.5) * WIDTH for i in range(len(pairs))]
            bars = axis.bar(places, heights, WIDTH, color=COLORS[side], label=name)
            axis.bar_label(bars, fmt="{:.3g}", fontsize=8)
        axis.set(ylabel=label)
        axis.set_xticks(range(len(pairs)), [title for _, _, title in pairs], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _ordered(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda r: (r["model"], r["load"]["batch"], r["prompt_tokens"]))


def _pair(result: Result) -> tuple[Result, Result, str] | None:
    rows = [row for row in result["rows"] if "reason" not in row]
    plain = next((row for row in rows if row["row"] == PLAIN), None)
    ours = next((row for row in rows if "cache_bytes" in row), None)
    if plain is None or ours is None:
        return None
    return plain, ours, f"batch {result['load']['batch']},\n{result['prompt_tokens']:,} tokens"
