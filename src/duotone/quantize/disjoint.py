"""Proof that calibration and evaluation samples are disjoint, by the samples' content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from duotone.hf.weights.checkpoint import quantization_of
from duotone.tasks import Example, Task

SHOWN = 5


def content_hash(example: Example) -> str:
    """Hash of a question and the pixels of its pictures, independent of names, files and splits."""
    found = hashlib.sha256(example.question.encode())
    for image in example.images:
        pixels = image.convert("RGB")
        found.update(f"|{pixels.size}|".encode())
        found.update(pixels.tobytes())
    return found.hexdigest()[:24]


def check_evaluation(model: Any, task: Task, samples: int, split: str) -> None:
    """Check a quantized model's calibration samples against its evaluation samples."""
    known = quantization_of(model)
    if known is not None:
        hashes = known.header["calibration"]["hashes"]
        check_disjoint(hashes, (task.example(index, split) for index in range(samples)))


def check_disjoint(calibration: Mapping[str, str], evaluation: Iterable[Example]) -> None:
    """Check against calibration {content hash: name}. Errors: ValueError naming samples in both."""
    both = [
        f"{example.name} (calibrated on as {calibration[found]})"
        for example in evaluation
        if (found := content_hash(example)) in calibration
    ]
    if both:
        more = f" and {len(both) - SHOWN} more" if len(both) > SHOWN else ""
        raise ValueError(
            "a model must be evaluated on other data than it was calibrated on, got "
            f"{len(both)} samples in both: {', '.join(both[:SHOWN])}{more}. Evaluate on another "
            "split or file, or calibrate on other samples"
        )
