"""Quality against true bits on held-out data: every scheme, and calibrated specs of all widths.

python -m benchmarks.transform.plot --out docs/img
"""

import argparse
import json
from pathlib import Path
from typing import Any

from duotone.report.plots import figure, legend, panels

RESULTS = Path(__file__).parents[2] / "results"
TASKS = ("captions", "documents", "sequences")
# Labels of the rows that are drawn of results/schemes, by their beginning.
NAMED = (
    "duotone-whole @",
    "calibquant @",
    "minmax @",
    "lloyd @",
    "kivi @",
    "innerq @",
    "vl-cache @",
)
LEAST_KL, MOST_BITS = 3e-6, 5.0
# The same in every panel; ours strong, the others pale.
COLOURS = {
    "calibrated (duotone-klt)": "#c2185b",
    "calibrated, whole spans": "#7b1fa2",
    "duotone": "#1565c0",
    "KIVI's axes on spans": "#2e7d32",
    "duotone-whole": "#64b5f6",
    "calibquant": "#ffa726",
    "minmax": "#bcaaa4",
    "lloyd": "#ef9a9a",
    "kivi": "#a5d6a7",
    "innerq": "#80cbc4",
    "vl-cache": "#b0bec5",
}


def read(path: Path) -> dict[str, Any]:
    """A result file."""
    return json.loads(path.read_text(encoding="utf-8"))


def bits_of(scheme: dict[str, Any]) -> float:
    """True bits per visual number; of a stream those of the whole cache."""
    memory = scheme["memory"]
    return memory.get("visual_bits_per_element") or memory["bits_per_element"]


def points_of_schemes(task: str) -> dict[str, list[tuple[float, dict]]]:
    """{scheme: points (true bits, KL)} of results/schemes."""
    found: dict[str, list] = {}
    for label, scheme in read(RESULTS / f"schemes/{task}.json")["schemes"].items():
        if label.startswith(NAMED):
            name = label.split(" @")[0]
            found.setdefault(name, []).append((bits_of(scheme), scheme["metrics"]["kl"]))
    return found


def points_of_widths(task: str) -> dict[str, list[tuple[float, dict]]]:
    """{name: points} of results/transform: calibrated specs, and the schemes beside them."""
    found: dict[str, list] = {}
    for label, scheme in read(RESULTS / f"transform/widths/{task}.json")["schemes"].items():
        if "kl" in scheme["metrics"] and _family(label):
            found.setdefault(_family(label), []).append((bits_of(scheme), scheme["metrics"]["kl"]))
    return found


def _family(label: str) -> str:
    if label.startswith("klt whole"):
        return "calibrated, whole spans"
    if label.startswith(("klt", "duotone-klt")):
        return "calibrated (duotone-klt)"
    if label.startswith("span, KIVI"):
        return "KIVI's axes on spans"
    return "duotone" if label.startswith("duotone @") else ""


def draw_task(axes: Any, task: str) -> None:
    """KL by true bits, with intervals."""
    ours = points_of_widths(task)
    for name, points in (points_of_schemes(task) | ours).items():
        points = sorted(point for point in points if point[0] <= MOST_BITS)
        if not points:
            continue
        intervals = [interval for _, interval in points]
        kl = [max(one["value"], LEAST_KL) for one in intervals]
        low = [max(one["value"] - max(one["low"], LEAST_KL / 2), 0) for one in intervals]
        high = [one["high"] - one["value"] for one in intervals]
        style = {"linewidth": 2.2, "markersize": 6} if name in ours else {"alpha": 0.6}
        axes.errorbar(
            [bits for bits, _ in points],
            kl,
            yerr=[low, high],
            marker="o" if name in ours else "s",
            markersize=style.pop("markersize", 4),
            label=name,
            color=COLOURS[name],
            zorder=3 if name in ours else 2,
            **style,
        )
    axes.set(title=task, yscale="log", xlabel="true bits per visual number", xlim=(0, MOST_BITS))
    axes.grid(alpha=0.3)


def main() -> None:
    """Draw, once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    made = figure(15, 5.2)
    found = panels(made, len(TASKS), len(TASKS))
    for axes, task in zip(found, TASKS, strict=True):
        draw_task(axes, task)
    found[0].set_ylabel("KL(16-bit || scheme), nats")
    legend(made, found, "lower center", columns=6)
    made.savefig(out / "transform-pareto.png", dpi=110)


if __name__ == "__main__":
    main()
