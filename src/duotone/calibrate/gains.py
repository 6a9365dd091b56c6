"""Gain of V's levels where spans are whole: the samples of a calibration choose it.

Few levels lose the mean of tokens. A constant restores it best on spans of 256 tokens of the
embedded model. On spans of 49 tokens of other models the fit of each block is several times nearer
to 16 bit (dev/log/quality.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from duotone.quant import CacheSpec
from duotone.quant.bases import Bases, with_files
from duotone.tune.batches import ready
from duotone.tune.trials import Meter

from .moments import CalibrationBatch

MEASURED = 3  # batches, from the first to the last


def nearest(
    model: Any, bases: Bases, specs: Mapping[Any, CacheSpec], batches: Sequence[CalibrationBatch]
) -> Any:
    """Label of the spec nearest to 16 bit on some of the calibration's own batches."""
    some = (batches[number] for number in spread(len(batches), MEASURED))
    prepared = [ready(model, batch.tensors, batch.answer_tokens) for batch in some]
    meter = Meter(model, {"calibration": prepared}, "visual")
    with TemporaryDirectory() as folder:
        scores = {
            label: meter.outcome(elsewhere(bases, spec, Path(folder))).score
            for label, spec in specs.items()
        }
    return min(scores, key=scores.__getitem__)


def spread(count: int, most: int) -> list[int]:
    """At most `most` >= 2 numbers below `count` at even steps, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [step * (count - 1) // (most - 1) for step in range(most)]


def elsewhere(bases: Bases, spec: CacheSpec, folder: Path) -> CacheSpec:
    """The spec with its bases in a file of `folder`: no file of the user's is written yet."""
    file = folder / "bases.safetensors"
    if not file.exists():
        bases.save(file)
    return CacheSpec.from_dict(with_files(spec.to_dict(), lambda _: str(file)))
