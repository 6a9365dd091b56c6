"""Picture of `model.generate`: ms per token and gigabytes of the cache, plain and inside enable.

python -m benchmarks.generate.plot --out docs/img
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.report.generate import STATIC, ordered, summarized
from duotone.report.markdown import Result
from duotone.report.plots import figure, legend, panels
from duotone.report.tables import read_results

RESULTS = Path(__file__).parents[2] / "results" / "generate"
SCHEMA = "duotone.generate/1"
COLOURS = {"plain": "0.6", STATIC: "0.8", "enable": "C0"}
BAR = 0.27


def generate(results: Sequence[Result]) -> Any:
    """Bars per load without padding: ms per token, and gigabytes of the cache.

    Errors: ValueError where no result has both a plain row and one of `enable`.
    """
    even = [result for result in ordered(results) if not result["load"]["padded"]]
    found = [one for result in even if (one := summarized(result))]
    if not found:
        raise ValueError("a picture needs a plain row and one of enable; got none.")
    made = figure(2 * max(4.6, 2 * len(found)), 3.2)
    times, sizes = panels(made, 2, 2)
    _bars(times, found, {"plain": 0, STATIC: 1, "enable": 2}, "ms", "{:.1f}")
    _bars(sizes, found, {"plain": 0, "enable": 1}, "gb", "{:.2f}")
    times.set_ylabel("ms per token")
    sizes.set_ylabel("GB of the cache")
    legend(made, [times], "upper center", columns=3)
    return made


def _bars(axis: Any, found: Sequence[Result], bars: Mapping[str, int], key: str, form: str) -> None:
    """A bar of each name per load; numbers that were not measured have none."""
    bars = {name: i for name, i in bars.items() if any(one[key][i] is not None for one in found)}
    for place, (name, index) in enumerate(bars.items()):
        shift = (place - (len(bars) - 1) / 2) * BAR
        points = [(at, one[key][index]) for at, one in enumerate(found)]
        points = [(at + shift, height) for at, height in points if height is not None]
        drawn = axis.bar(*zip(*points, strict=True), BAR, color=COLOURS[name], label=name)
        axis.bar_label(drawn, fmt=form, fontsize="small")
    several = len({one["device"] for one in found}) > 1
    axis.set_xticks(range(len(found)), [_tick(one, several) for one in found], fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _tick(summary: Result, names_card: bool) -> str:
    """A load on lines of its own: the model, batch and tokens, the scheme, the card if asked."""
    model, _, load = summary["title"].partition(" (")
    lines = [model, load.partition("), ")[2], summary["row"]]
    return "\n".join([*lines, summary["device"]] if names_card else lines)


def main() -> None:
    """Draw all results as one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    found = [result for result in read_results(RESULTS) if result["schema"] == SCHEMA]
    generate(found).savefig(out / "generate.png")


if __name__ == "__main__":
    main()
