"""Numbers of the report: specs on samples that the search never saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duotone import CacheSpec
from duotone.evaluate import evaluate
from duotone.evaluate.forcing import forced_scores
from duotone.tasks import Task
from duotone.tasks.metrics import confidence_interval, paired_difference

from .objective import Measured
from .samples import Parts
from .trials import Meter, outcome_of

Rows = dict[str, Measured]


def entry(tasks: Rows, chosen: Rows | None = None) -> dict[str, Any]:
    """JSON-safe numbers of one spec: true bits, geometric mean of KL, and each task's intervals.

    chosen: another spec's measurements; adds the paired difference KL(this) - KL(chosen).
    """
    outcome, data = outcome_of(tasks), {}
    for name, measured in tasks.items():
        scores = forced_scores(measured.rows)
        data[name] = {k: confidence_interval(score).to_dict() for k, score in scores.items()}
        if chosen is not None:
            other = forced_scores(chosen[name].rows)["kl"]
            data[name]["kl_minus_chosen"] = paired_difference(scores["kl"], other).to_dict()
    held = [one.held for one in tasks.values()]
    total = sum(held[1:], held[0])
    return {
        "bits": outcome.bits,
        "bytes_per_sequence": total.bytes_per_sequence,
        "kl": 10**outcome.score,
        "packed": outcome.packed,
        "tasks": data,
    }


def measure_all(
    meter: Meter,
    specs: Mapping[str, CacheSpec],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Rows]:
    """{label: {task: measured}} of all specs on the meter's batches; equal specs run once."""
    done: dict[CacheSpec, Rows] = {}
    for count, spec in enumerate(specs.values(), start=1):
        if spec not in done:
            done[spec] = meter.measured(spec)[0]
        if progress:
            progress(count, len(specs))
    return {label: done[spec] for label, spec in specs.items()}


def task_scores(
    loaded: Any,
    parts: Sequence[Parts],
    specs: Mapping[str, CacheSpec],
    *,
    later: Mapping[str, bool],
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """{task: {"headline", "schemes": {label: {metric: interval}}}} of generated answers."""
    scores = {}
    # Prompts that are tensors have no accepted answers.
    scored = [part for part in parts if isinstance(part.heldout, Task)]
    for count, part in enumerate(scored, start=1):
        task = part.heldout
        results = evaluate(
            loaded.model,
            loaded.processor,
            task,
            specs,
            task.size,
            later_question=later[task.name],
            **settings,
        ).results
        metrics = {label: result["metrics"] for label, result in results.items()}
        scores[task.name] = {"headline": task.headline, "schemes": metrics}
        if progress:
            progress(count, len(scored))
    return scores
