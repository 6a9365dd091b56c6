"""Batches of rendered and encoded examples, made by worker processes ahead of the model."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from duotone.inference import encode
from duotone.tasks import Example, Task


@dataclass(frozen=True)
class _Rendered(torch.utils.data.Dataset):
    """Examples 0..samples-1 of a split, rendered on access."""

    task: Task
    split: str
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Example:
        return self.task.example(index, self.split)


@dataclass(frozen=True)
class _Encode:
    """Examples -> (examples without pictures, arrays of the batch).

    Arrays, not tensors: tensors would travel through shared memory, which is scarce in containers.
    """

    processor: Any

    def __call__(self, examples: list[Example]) -> tuple[list[Example], dict[str, np.ndarray]]:
        encoded = encode(self.processor, [example.messages() for example in examples])
        arrays = {name: tensor.numpy() for name, tensor in encoded.items()}
        return [example.without_images() for example in examples], arrays


def _quiet_tokenizers(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def default_workers(device: torch.device) -> int:
    """Processes that render: up to 8 beside a GPU, none where the CPU runs the model."""
    return min(8, max(1, (os.cpu_count() or 2) - 1)) if device.type == "cuda" else 0


def load_batches(
    task: Task, processor: Any, split: str, samples: int, batch_size: int, workers: int
) -> Iterator[tuple[list[Example], dict[str, torch.Tensor]]]:
    """Batches in order; with workers > 0 they are made in parallel."""
    loader = torch.utils.data.DataLoader(
        _Rendered(task, split, samples),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_Encode(processor),
        worker_init_fn=_quiet_tokenizers if workers else None,
    )
    for examples, arrays in loader:
        yield examples, {name: torch.from_numpy(array) for name, array in arrays.items()}
