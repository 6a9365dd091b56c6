"""The model of each recipe: made once, kept as a checkpoint, read from there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from duotone.hf.weights import checkpoint
from duotone.loading import Loaded
from duotone.planning.card import AS_IT_IS
from duotone.quantize import calibration_set, quantize_model
from duotone.tasks import Task
from duotone.weights.methods.recipe import get_recipe

WEIGHTS, PARTIAL = "weights", "weights.partial"
# Share of the search's samples that weights are calibrated on: the first ones.
CALIBRATED = 0.5


def check_tasks(tasks: Sequence[Any]) -> None:
    """Raise ValueError for prompts without the answers that weights are calibrated on."""
    for task in tasks:
        if not isinstance(task, Task):
            raise ValueError(
                "weights are calibrated on prompts with their answers: give a task or a .jsonl "
                f"file; got {task.name!r}, prompts alone. For the cache alone: --budget-bits"
            )


def model_of(
    recipe: str,
    load: Callable[[], Loaded],
    tasks: Sequence[Task],
    batch_size: int,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """The model by a recipe, from `folder` if it was made there before.

    load: loads the 16-bit model anew. tasks: to search on; the first half calibrates.
    """
    if recipe == AS_IT_IS:
        return load()
    kept = folder / WEIGHTS
    base = load()
    if not checkpoint.is_quantized_folder(kept):
        _quantize(base, recipe, tasks, batch_size, folder, progress)
    device, name = base.model.device, f"{base.name} by {recipe}"
    model = checkpoint.load(kept).to(device)
    return replace(base, name=name, model=model)


def _quantize(
    base: Loaded,
    recipe: str,
    tasks: Sequence[Task],
    batch_size: int,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    samples = max(1, int(CALIBRATED * min(task.size for task in tasks)))
    data = calibration_set(base, tasks, samples, batch_size)
    quantize_model(
        base.model,
        get_recipe(recipe),
        data,
        name=base.name,
        partial=folder / PARTIAL,
        progress=progress,
        finish=lambda: checkpoint.save(base.model, folder / WEIGHTS, base.processor),
    )
