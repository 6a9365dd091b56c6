"""Inspection of a model: numbers by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duotone.calibrate import CalibrationData, Settings
from duotone.calibrate.run import learn
from duotone.loading import Loaded

from .layers import layer_rows, total_row

SCHEMA = "duotone.inspect/2"


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
