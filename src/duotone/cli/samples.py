"""Input of commands: tasks by name, the model, batches of the tasks' samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import EMBEDDED_TASKS, error_console, load_model

TEXT, TENSORS = ".txt", ".safetensors"


def named_tasks(
    names: list[str] | None,
    model: str | None,
    context: int | None = None,
    *,
    own: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Tasks by name; without names the embedded tasks, which only the embedded model answers.

    context: tokens of a stretch of a .txt file. Without it, no text and no tensors are taken.
    own: {name: task} of `without_data`, taken as well; where no task is named, other models have
    the one of them that they can take.
    """
    from duotone.tasks import MADE_UP

    own = own or {}
    names = names or _usual_names(model, own)
    tasks = [own.get(name) or _task(name, context) for name in names]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        raise ValueError(f"tasks must have different names, got {known}")
    if MADE_UP in tasks:
        _check_pictured(model)
    return tasks


def without_data(context: int | None) -> dict[str, Any]:
    """{name: task} of a calibration's samples that need no data.

    context: tokens of a stretch of written text; None: its own.
    """
    from duotone.calibrate.written import Written
    from duotone.tasks import MADE_UP

    written = Written() if context is None else Written(context)
    return {task.name: task for task in (MADE_UP, written)}


def _usual_names(model: str | None, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a model's tasks where none are given, by its configuration alone."""
    from duotone.loading import EMBEDDED, has_visual_tokens, load_config
    from duotone.tasks import MADE_UP, WRITTEN

    if model in (None, EMBEDDED):
        return EMBEDDED_TASKS
    if not own:
        raise ValueError(
            f"samples of your own must be named for {model!r}: a .jsonl file of "
            '{"images": [...], "question": ..., "answers": [...]}, or a task'
        )
    return (MADE_UP.name if has_visual_tokens(load_config(model)) else WRITTEN,)


def _check_pictured(model: str | None) -> None:
    """Raise ValueError for a model without visual tokens, by its configuration alone."""
    from duotone.loading import has_visual_tokens, load_config

    if not has_visual_tokens(config := load_config(model)):
        raise ValueError(
            "made-up samples are pictures, for a model with visual tokens; got "
            f"{model!r}, a {config.model_type!r} whose tokens are text only. Leave --task out, for "
            "text that it writes itself"
        )


def _task(name: str, context: int | None) -> Any:
    from duotone.tasks import get_task

    return _from_file(name, context) or get_task(name)


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
    names: list[str] | None,
    model: str | None,
    samples: int | None,
    context: int | None = None,
    *,
    own: Mapping[str, Any] | None = None,
) -> tuple[list[Any], int]:
    """(tasks by name, samples of each that they have). None: as many as a calibration takes."""
    from duotone.calibrate.data import usual_samples

    tasks = named_tasks(names, model, context, own=own)
    count = usual_samples(tasks) if samples is None else samples
    for task in tasks:
        task.check_samples(count)
    return tasks, count


def load_with_data(
    model: str | None, device: str | None, settings: Any, tasks: list[Any], **sizes: int
) -> tuple[Any, Any]:
    """(model, calibration data), where the settings fit the model. sizes: samples, batch_size,
    heldout."""
    from duotone.calibrate import calibration_data
    from duotone.calibrate.run import check_settings

    loaded = load_model(model, device)
    check_settings(loaded.model, settings)
    with error_console().status("making samples"):
        return loaded, calibration_data(loaded, tasks, text=settings.text, **sizes)
