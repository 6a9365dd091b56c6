"""Pictures from result files, by schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.bench.kernel_plots import draw_roofline, draw_speedups

# By schema: {name of the picture: a function of (result, path)}.
PLOTS: dict[str, dict[str, Callable[[Mapping[str, Any], Path], None]]] = {
    "duotone.kernels/1": {"speedup": draw_speedups, "roofline": draw_roofline},
}
FORMATS = ("png", "svg")


def draw(results: Sequence[Path], folder: Path, form: str = "png") -> list[Path]:
    """Write FILE-PICTURE.FORM for every picture of every result file; returns what was written.

    Errors: ValueError for other formats and files; ImportError without matplotlib.
    """
    if form not in FORMATS:
        raise ValueError(f"--format must be one of {FORMATS}, got {form!r}")
    need_matplotlib()
    written = []
    for path in results:
        result = _read(path)
        for name, picture in PLOTS[result["schema"]].items():
            target = folder / f"{path.stem}-{name}.{form}"
            target.parent.mkdir(parents=True, exist_ok=True)
            picture(result, target)
            written.append(target)
    return written


def need_matplotlib() -> None:
    """Raise ImportError, with what to do, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install 'duotone[plot]'"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a result file of duotone bench: {error}") from error
    if not isinstance(data, dict) or data.get("schema") not in PLOTS:
        raise ValueError(f"{path} must be a result file with a schema among {sorted(PLOTS)}")
    return data
