"""Pictures from result files, by schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.bench.generate_plots import draw_generate
from duotone.bench.kernel_plots import draw_roofline, draw_speedups
from duotone.bench.throughput_plots import draw_shares, draw_throughput
from duotone.report.files import read_file

# By schema: {name of the picture: a function of (result, path)}.
PLOTS: dict[str, dict[str, Callable[[Mapping[str, Any], Path], None]]] = {
    "duotone.kernels/1": {"speedup": draw_speedups, "roofline": draw_roofline},
}
# The same for files that are drawn together: a function of (results, path).
JOINT_PLOTS: dict[str, dict[str, Callable[[Sequence[Mapping[str, Any]], Path], None]]] = {
    "duotone.generate/1": {"generate": draw_generate},
    "duotone.throughput/1": {"throughput": draw_throughput, "throughput-roofline": draw_shares},
}
FORMATS = ("png", "svg")


def draw(results: Sequence[Path], folder: Path, form: str = "png") -> list[Path]:
    """Write FILE-PICTURE.FORM for every picture of every result file; returns the written files.

    Results of throughput and of generate are drawn together, as PICTURE.FORM. FILE has a number
    for each line of a .jsonl of several results.

    Errors: ValueError for other formats and files; ImportError without matplotlib.
    """
    if form not in FORMATS:
        raise ValueError(f"--format must be one of {FORMATS}, got {form!r}")
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written, together = [], {}
    for stem, result in [named for path in results for named in _read(path).items()]:
        together.setdefault(result["schema"], []).append(result)
        for name, picture in PLOTS.get(result["schema"], {}).items():
            written.append(folder / f"{stem}-{name}.{form}")
            picture(result, written[-1])
    for schema, found in together.items():
        for name, joint in JOINT_PLOTS.get(schema, {}).items():
            written.append(folder / f"{name}.{form}")
            joint(found, written[-1])
    return written


def need_matplotlib() -> None:
    """Raise ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install 'duotone[plot]'"
        ) from error


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Results of a file, by what their pictures are called."""
    try:
        found = read_file(path)
    except ValueError as error:
        raise ValueError(f"{path} must be a result file of duotone bench: {error}") from error
    known = {**PLOTS, **JOINT_PLOTS}
    if not all(isinstance(data, dict) and data.get("schema") in known for data in found):
        raise ValueError(f"{path} must be a result file with a schema among {sorted(known)}")
    several = len(found) > 1
    return {f"{path.stem}-{i}" if several else path.stem: r for i, r in enumerate(found, start=1)}
