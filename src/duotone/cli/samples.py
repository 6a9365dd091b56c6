"""Input of commands: tasks by name, the model, batches of the tasks' samples."""

from pathlib import Path
from typing import Any

from .common import EMBEDDED_TASKS, load_model

TEXT, TENSORS = ".txt", ".safetensors"


def named_tasks(
    names: list[str] | None, model: str | None, context: int | None = None
) -> list[Any]:
    """Tasks by name; without names the embedded tasks, which only the embedded model answers.

    context: tokens of a stretch of a .txt file. Without it, no text and no tensors are taken.
    """
    from duotone.loading import EMBEDDED
    from duotone.tasks import get_task

    if not names and model not in (None, EMBEDDED):
        raise ValueError(
            f"samples of your own must be named for {model!r}: a .jsonl file of "
            '{"images": [...], "question": ..., "answers": [...]}, or a task'
        )
    tasks = [_from_file(name, context) or get_task(name) for name in names or EMBEDDED_TASKS]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        raise ValueError(f"tasks must have different names, got {known}")
    return tasks


def _from_file(name: str, context: int | None) -> Any:
    """Prompts of a text or of tensors, None of other names."""
    from duotone.inference.encoded import EncodedPrompts, TextFile
    from duotone.tasks.text.rows import read_text

    path = Path(name)
    if context is None or path.suffix not in (TEXT, TENSORS):
        return None
    if path.suffix == TEXT:
        return TextFile(path.stem, read_text(path), context)
    return EncodedPrompts.load(path)


def sampled_tasks(
    names: list[str] | None, model: str | None, samples: int, context: int | None = None
) -> list[Any]:
    """Tasks by name that have so many samples."""
    tasks = named_tasks(names, model, context)
    for task in tasks:
        task.check_samples(samples)
    return tasks


def load_with_data(
    model: str | None, device: str | None, settings: Any, tasks: list[Any], **sizes: int
) -> tuple[Any, Any]:
    """(model, calibration data), where the settings fit the model. sizes: samples, batch_size,
    heldout."""
    from duotone.calibrate import calibration_data
    from duotone.calibrate.run import check_settings

    loaded = load_model(model, device)
    check_settings(loaded.model, settings)
    return loaded, calibration_data(loaded, tasks, **sizes)
