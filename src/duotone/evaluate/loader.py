"""Batches of rendered and encoded examples, made by worker processes in advance."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from duotone.inference.batch import encode
from duotone.inference.encoded import EncodedPrompts
from duotone.inference.prompts import encode_text
from duotone.loading import Loaded
from duotone.tasks import Example, Task


@dataclass(frozen=True)
class _Rendered(torch.utils.data.Dataset):
    """Examples first..samples-1 of a split, rendered on access."""

    task: Task
    split: str
    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples - self.first

    def __getitem__(self, index: int) -> Example:
        return self.task.example(self.first + index, self.split)


@dataclass(frozen=True)
class Encoder:
    """Examples -> tensors of a batch, as the model wants its prompts.

    takes_images: the model is multimodal and `processor` its processor; else a tokenizer.
    """

    processor: Any
    takes_images: bool

    def __call__(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Left-padded tensors."""
        if self.takes_images:
            return encode(self.processor, [example.messages() for example in examples])
        if any(example.images for example in examples):
            raise ValueError(
                "a task with pictures needs a multimodal model, got one that takes text only; "
                "choose another --model, or a task without pictures"
            )
        return encode_text(self.processor, [example.question for example in examples])


@dataclass(frozen=True)
class _Collate:
    """Examples -> (examples without pictures, arrays of the batch).

    Arrays, not tensors: tensors would travel through shared memory, which is scarce in containers.
    """

    encoder: Encoder

    def __call__(self, examples: list[Example]) -> tuple[list[Example], dict[str, np.ndarray]]:
        arrays = {name: tensor.numpy() for name, tensor in self.encoder(examples).items()}
        return [example.without_images() for example in examples], arrays


def _quiet_tokenizers(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def default_workers(device: torch.device) -> int:
    """Number of rendering processes: up to 8 with a GPU, none where the CPU runs the model."""
    return min(8, max(1, (os.cpu_count() or 2) - 1)) if device.type == "cuda" else 0


def encoded_task(
    loaded: Loaded, task: Task | EncodedPrompts, split: str, samples: int, batch_size: int
) -> list[tuple[list[Example], dict[str, torch.Tensor]]]:
    """All batches of a task's first samples, encoded for a model.

    Prompts that are tensors already have examples of nothing but a name.
    """
    if isinstance(task, EncodedPrompts):
        numbers = iter(range(samples))
        return [
            ([_nameless(next(numbers)) for _ in batch["attention_mask"]], batch)
            for batch in task.batches(samples, batch_size)
        ]
    encoder = Encoder(loaded.processor, loaded.takes_images)
    workers = default_workers(loaded.model.device)
    return list(load_batches(task, encoder, split, samples, batch_size, workers))


def _nameless(number: int) -> Example:
    return Example(f"prompt-{number}", (), "", ())


def load_batches(
    task: Task,
    encoder: Encoder,
    split: str,
    samples: int,
    batch_size: int,
    workers: int,
    first: int = 0,
) -> Iterator[tuple[list[Example], dict[str, torch.Tensor]]]:
    """Batches in order, from example `first` on; with workers > 0 they are made in parallel."""
    loader = torch.utils.data.DataLoader(
        _Rendered(task, split, first, samples),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_Collate(encoder),
        worker_init_fn=_quiet_tokenizers if workers else None,
    )
    for examples, arrays in loader:
        yield examples, {name: torch.from_numpy(array) for name, array in arrays.items()}
