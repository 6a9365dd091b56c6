"""Calibration data: encoded prompts of some tasks, and a record of their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from duotone.evaluate.loader import Encoder, default_workers, load_batches
from duotone.loading import Loaded, image_token_ids
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


def _encode(
    loaded: Loaded, task: Task, samples: int, batch_size: int
) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Batches of a task's first samples, and the samples' names."""
    encoder = Encoder(loaded.processor, loaded.takes_images)
    workers = default_workers(loaded.model.device)
    made = list(load_batches(task, encoder, SPLIT, samples, batch_size, workers))
    return [tensors for _, tensors in made], [e.name for examples, _ in made for e in examples]


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
        encoded, names = _encode(loaded, task, samples, batch_size)
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
    known = torch.tensor(image_token_ids(loaded.model.config))
    ids = [batch.tensors["input_ids"] for batch in batches]
    if loaded.takes_images and not any(bool(torch.isin(i, known.to(i)).any()) for i in ids):
        raise ValueError(
            f"bases of {loaded.name!r} are of its visual tokens, got {sum(map(len, ids))} prompts "
            "without any; give a task with pictures, e.g. --task captions"
        )
