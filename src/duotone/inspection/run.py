"""Inspection of a model: numbers by layer, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from duotone.calibrate import CalibrationData, Settings
from duotone.calibrate.run import learn
from duotone.loading import Loaded
from duotone.report.provenance import write_new_json

from .layers import layer_rows, total_row

SCHEMA = "duotone.inspect/2"
REPORT = "inspect.json"
FORMATS = ("png", "svg")


def inspect_model(
    loaded: Loaded,
    data: CalibrationData,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Spectra of K and V and gains of calibrated bases for this model on these samples.

    Returns a JSON-safe report: "header", "layers" (`layer_rows`) and "total" (`total_row`).
    progress: called with (done, total). Errors: ValueError for a model or settings that do not fit,
    before it runs.
    """
    settings = settings or Settings()
    learned = learn(loaded, data.batches, settings, data=data.sources, progress=progress)
    rows = layer_rows(learned, settings)
    return {
        "schema": SCHEMA,
        "header": learned.bases.header,
        "layers": rows,
        "total": total_row(rows),
    }


def check_folder_is_new(folder: Path) -> Path:
    """Make a folder for the files. Errors: ValueError if it holds files, or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"--out must be a folder that can be made, got {str(folder)!r}: {error}"
        ) from error
    if found:
        raise ValueError(
            f"files are never overwritten, got the folder {str(folder)!r} with {found[0]!r} in it; "
            "name another"
        )
    return folder


def write_report(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write inspect.json and all pictures, as PNG and SVG; returns the files.

    Errors: ImportError without matplotlib.
    """
    from duotone.report import plots

    pictures = {"spectra": plots.spectra, "gains": plots.gains}
    files = [write_new_json(folder / REPORT, report)]
    for name, draw in pictures.items():
        figure = draw(report)
        for form in FORMATS:
            files.append(folder / f"{name}.{form}")
            figure.savefig(files[-1])
    return files
