"""Input of commands: tasks by name, the model, batches of the tasks' samples."""

from typing import Any

from .common import EMBEDDED_TASKS, load_model


def named_tasks(names: list[str] | None, model: str | None) -> list[Any]:
    """Tasks by name; without names the embedded tasks, which only the embedded model answers."""
    from duotone.loading import EMBEDDED
    from duotone.tasks import get_task

    if not names and model not in (None, EMBEDDED):
        raise ValueError(
            f"samples of your own must be named for {model!r}: a .jsonl file of "
            '{"images": [...], "question": ..., "answers": [...]}, or a task'
        )
    tasks = [get_task(name) for name in names or EMBEDDED_TASKS]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        raise ValueError(f"tasks must have different names, got {known}")
    return tasks


def sampled_tasks(names: list[str] | None, model: str | None, samples: int) -> list[Any]:
    """Tasks by name that have so many samples."""
    tasks = named_tasks(names, model)
    for task in tasks:
        task.check_samples(samples)
    return tasks


def load_with_data(
    model: str | None, device: str | None, settings: Any, tasks: list[Any], **sizes: int
) -> tuple[Any, Any]:
    """(model, calibration data), where the settings fit the model. sizes: samples, batch_size,
    heldout."""
    from duotone.calibrate import calibration_data
    from duotone.hf.model.facts import model_facts

    loaded = load_model(model, device)
    settings.check(model_facts(loaded.model).shape.head_dim)
    return loaded, calibration_data(loaded, tasks, **sizes)
