"""Calibration data: encoded prompts of some tasks, and a record of their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from duotone.evaluate.loader import encoded_task
from duotone.loading import Loaded, visual_mask
from duotone.tasks import Task

from .moments import CalibrationBatch

SPLIT = "calibration"


@dataclass(frozen=True)
class CalibrationData:
    """All batches, and for every task its name, split, samples and a digest; JSON-safe."""

    batches: list[CalibrationBatch]
    sources: list[dict[str, Any]]


def digest(batches: Sequence[dict[str, torch.Tensor]]) -> str:
    """Digest of the prompts' token ids and pixels, independent of padding and batch size."""
    found = hashlib.sha256()
    for batch in batches:
        for ids, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            found.update(ids[real].numpy().tobytes() + b"|")
    pixels = [batch[name] for batch in batches for name in sorted(batch) if "pixel" in name]
    for tensor in pixels:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def calibration_data(
    loaded: Loaded, tasks: Sequence[Task], samples: int, batch_size: int = 4
) -> CalibrationData:
    """The first samples of every task's calibration split; a file has one split only.

    Errors: ValueError where a task has fewer samples, or where a multimodal model would see no
    visual token to calibrate.
    """
    for task in tasks:
        task.check_samples(samples)
    batches, sources = [], []
    for task in tasks:
        made = encoded_task(loaded, task, SPLIT, samples, batch_size)
        encoded = [tensors for _, tensors in made]
        names = [example.name for examples, _ in made for example in examples]
        batches += [CalibrationBatch(tensors, task.max_new_tokens) for tensors in encoded]
        source = {
            "task": task.name,
            "split": SPLIT,
            "samples": samples,
            "rows": [names[0], names[-1]],
        }
        sources.append(source | {"digest": digest(encoded), "data": task.fingerprint})
    _check_visual(loaded, batches)
    return CalibrationData(batches, sources)


def _check_visual(loaded: Loaded, batches: Sequence[CalibrationBatch]) -> None:
    ids = [batch.tensors["input_ids"] for batch in batches]
    seen = any(bool(visual_mask(loaded.model.config, i).any()) for i in ids)
    if loaded.takes_images and not seen:
        raise ValueError(
            f"bases of {loaded.name!r} are of its visual tokens, got {sum(map(len, ids))} prompts "
            "without any; give a task with pictures, e.g. --task captions"
        )
