"""Inspection of a model: numbers by layer, errors of schemes, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from duotone.calibrate import CalibrationData, Settings
from duotone.calibrate.run import learn
from duotone.loading import Loaded
from duotone.report.provenance import write_new_json

from .errors import ErrorMeter, Schemes
from .layers import layer_rows, total_row

SCHEMA = "duotone.inspect/1"
REPORT = "inspect.json"
FORMATS = ("png", "svg")


def inspect_model(
    loaded: Loaded,
    data: CalibrationData,
    settings: Settings | None = None,
    schemes: Schemes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Gains of calibrated bases for this model on these samples, and errors of schemes.

    Returns a JSON-safe report: "header", "layers" (`layer_rows`), "total" (`total_row`), "specs"
    and "errors" (`ErrorMeter.entries`), the last two by scheme. progress: called with (done,
    total). Errors: ValueError for a model, settings or schemes that do not fit, before it runs.
    """
    settings, schemes = settings or Settings(), schemes or {}
    meter = ErrorMeter(loaded.model, data.batches, schemes) if schemes else None
    learned = learn(
        loaded,
        data.batches,
        settings,
        data=data.sources,
        progress=progress,
        audience=meter,
    )
    rows = layer_rows(learned, settings)
    return {
        "schema": SCHEMA,
        "header": learned.bases.header,
        "layers": rows,
        "total": total_row(rows, settings),
        "specs": {label: spec.to_dict() for label, spec in schemes.items()},
        "errors": meter.entries() if meter else [],
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
    if report["errors"]:
        pictures |= {"scores": plots.scores, "errors": plots.errors}
    files = [write_new_json(folder / REPORT, report)]
    for name, draw in pictures.items():
        figure = draw(report)
        for form in FORMATS:
            files.append(folder / f"{name}.{form}")
            figure.savefig(files[-1])
    return files
