"""Calibration data: encoded prompts of some tasks, others held out, and their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from duotone.evaluate.loader import encoded_task
from duotone.inference.batch import visual_of
from duotone.inference.encoded import EncodedPrompts, TextFile, encoded_if_text
from duotone.loading import Loaded
from duotone.tasks import MADE_UP, Task
from duotone.tune.samples import HELD_OUT, AnyTask, split_task

from .moments import CalibrationBatch
from .written import Written

SPLIT = "calibration"
# Per task, and of a calibration on made-up samples alone: those are further from a model's use.
SAMPLES, MADE_UP_SAMPLES = 16, 48


@dataclass(frozen=True)
class CalibrationData:
    """All batches, and for every task its name, split, samples and a digest; JSON-safe.

    heldout: {task: batches of other samples}, which a calibration never sees.
    """

    batches: list[CalibrationBatch]
    sources: list[dict[str, Any]]
    heldout: dict[str, list[CalibrationBatch]] = field(default_factory=dict)


def usual_samples(tasks: Sequence[AnyTask | TextFile | Written]) -> int:
    """Samples of each task where nobody says how many."""
    return MADE_UP_SAMPLES if list(tasks) == [MADE_UP] else SAMPLES


def digest(batches: Sequence[dict[str, torch.Tensor]]) -> str:
    """Digest of the prompts' token ids and pixels, independent of padding and batch size."""
    found = hashlib.sha256()
    for batch in batches:
        tokens = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
        for row, real in zip(tokens, batch["attention_mask"].bool(), strict=True):
            content = row[real] if row.dim() == 1 else row[real].float()
            found.update(content.contiguous().numpy().tobytes() + b"|")
    pixels = [batch[name] for batch in batches for name in sorted(batch) if "pixel" in name]
    for tensor in pixels:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def calibration_data(
    loaded: Loaded,
    tasks: Sequence[Task | EncodedPrompts | TextFile | Written],
    samples: int,
    batch_size: int = 4,
    heldout: int = 0,
    text: bool = False,
) -> CalibrationData:
    """The first samples of every task's calibration split; a file has one split only.

    heldout: samples per task, of the held-out split or of a file's later rows. They share no
    picture with the first rows, or no question where there are no pictures. text: they are for the
    stream of text (`Settings.text`), and need no pictures.
    Errors: ValueError where a task has fewer samples, or where a multimodal model would see no
    visual token though visual spans are to be calibrated.
    """
    tasks = [_encoded(loaded, task, samples + heldout) for task in tasks]
    for task in tasks:
        task.check_samples(samples)
    parts = [split_task(task, samples, heldout) for task in tasks] if heldout else []
    batches, sources, kept = [], [], {}
    for task in tasks:
        made = encoded_task(loaded, task, SPLIT, samples, batch_size)
        encoded = [tensors for _, tensors in made]
        names = [example.name for examples, _ in made for example in examples]
        batches += _batches(encoded, task)
        source = {
            "task": task.name,
            "split": SPLIT,
            "samples": samples,
            "rows": [names[0], names[-1]],
        }
        sources.append(source | {"digest": digest(encoded), "data": task.fingerprint})
    for part, source in zip(parts, sources, strict=bool(parts)):
        made = encoded_task(loaded, part.heldout, HELD_OUT, heldout, batch_size)
        kept[part.heldout.name] = _batches([tensors for _, tensors in made], part.heldout)
        names = ("samples", "rows", "digest")
        source["heldout"] = {name: part.evidence[f"heldout_{name}"] for name in names}
    if not text:
        _check_visual(loaded, batches)
    return CalibrationData(batches, sources, kept)


def _encoded(
    loaded: Loaded, task: Task | EncodedPrompts | TextFile | Written, count: int
) -> AnyTask:
    """A text's stretches, of which a model writes `count` itself; any other task as it is."""
    if isinstance(task, Written):
        return task.encoded(loaded, count)
    return encoded_if_text(loaded, task)


def _batches(encoded: Sequence[dict[str, torch.Tensor]], task: AnyTask) -> list[CalibrationBatch]:
    never = task.never if isinstance(task, EncodedPrompts) else ()
    return [CalibrationBatch(tensors, task.max_new_tokens, never) for tensors in encoded]


def _check_visual(loaded: Loaded, batches: Sequence[CalibrationBatch]) -> None:
    masks = [visual_of(loaded.model.config, batch.tensors) for batch in batches]
    prompts = sum(map(len, masks))
    if loaded.has_visual_tokens and not any(bool(mask.any()) for mask in masks):
        raise ValueError(
            f"bases of {loaded.name!r} are of its visual tokens, got {prompts} prompts "
            "without any; give a task with pictures, e.g. --task captions"
        )
