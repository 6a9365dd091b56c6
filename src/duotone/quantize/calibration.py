"""Calibration data for ranges and second moments: prompts with their answers.

Every sample includes its answer, as the model would write it. Decode steps use the text's scales,
which must have seen generated tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.evaluate.loader import Encoder
from duotone.hf.model.fingerprint import raw_bytes
from duotone.inference.prompts import tokenizer_of
from duotone.loading import Loaded
from duotone.tasks import Example, Task

from .disjoint import content_hash

SPLIT = "calibration"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class CalibrationSet:
    """Left-padded batches with answers.

    hashes: {content hash: name} of all samples. sources: of every task its name, split and number
    of samples; JSON-safe.
    """

    batches: list[Tensors]
    hashes: dict[str, str]
    sources: list[dict[str, Any]]

    def digest(self) -> str:
        """Digest of all tensors."""
        found = hashlib.sha256()
        for batch in self.batches:
            for name, tensor in sorted(batch.items()):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(raw_bytes(tensor))
        return found.hexdigest()[:16]


def calibration_set(
    loaded: Loaded, tasks: Sequence[Task], samples: int, batch_size: int = 4
) -> CalibrationSet:
    """The first `samples` of every task's calibration split; a file has one split only.

    Errors: ValueError where a task has fewer, or where a multimodal model would see no picture.
    """
    for task in tasks:
        task.check_samples(samples)
    batches, hashes, sources = [], {}, []
    for task in tasks:
        examples = [task.example(index, SPLIT) for index in range(samples)]
        check_pictures(loaded, task, examples)
        hashes |= {content_hash(e): f"{task.name}/{e.name}" for e in examples}
        encoder = Encoder(loaded.processor, loaded.takes_images)
        groups = [examples[i : i + batch_size] for i in range(0, samples, batch_size)]
        batches += [_with_answers(loaded, encoder(group), group) for group in groups]
        source = {"task": task.name, "split": SPLIT, "samples": samples, "data": task.fingerprint}
        sources.append(source)
    return CalibrationSet(batches, hashes, sources)


def check_pictures(loaded: Loaded, task: Task, examples: Sequence[Example]) -> None:
    """Raise ValueError where a multimodal model would be calibrated without any picture."""
    if loaded.takes_images and not any(example.images for example in examples):
        raise ValueError(
            f"{loaded.name!r} is multimodal and needs pictures to calibrate on, got none in the "
            f'first {len(examples)} samples of {task.name!r}; its rows must have "images": [...]'
        )


def _with_answers(loaded: Loaded, encoded: Tensors, examples: Sequence[Example]) -> Tensors:
    """The batch with every sample's first answer and the end token after its prompt."""
    tokenizer = tokenizer_of(loaded.processor)
    answers = _answer_ids(tokenizer, [example.answers[0] for example in examples])
    ends = loaded.model.generation_config.eos_token_id
    end = [] if ends is None else [ends if isinstance(ends, int) else ends[0]]
    return appended(encoded, [[*ids, *end] for ids in answers])


def _answer_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def appended(encoded: Tensors, answers: Sequence[Sequence[int]]) -> Tensors:
    """Tensors [B, T] with answers after the prompts, left-padded anew; other tensors unchanged.

    The answers' tokens are attended to and have no modality: ones in `attention_mask`, zeros in all
    other per-token tensors.
    """
    shape, real = encoded["input_ids"].shape, encoded["attention_mask"].bool()
    lengths = [int(row.sum()) + len(ids) for row, ids in zip(real, answers, strict=True)]
    fills = {"input_ids": None, "attention_mask": 1}
    made = {}
    for name, tensor in encoded.items():
        if tensor.shape != shape:
            made[name] = tensor
            continue
        rows = []
        for row, mask, ids in zip(tensor, real, answers, strict=True):
            fill = fills.get(name, 0)
            new = ids if name == "input_ids" else [fill] * len(ids)
            whole = torch.cat((row[mask], torch.tensor(new, dtype=row.dtype)))
            rows.append(F.pad(whole, (max(lengths) - len(whole), 0)))
        made[name] = torch.stack(rows)
    return made
