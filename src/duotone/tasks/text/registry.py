"""The generation tasks over text: one entry of TEXT_TASKS each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..task import Example, Task
from . import gsm8k, longbench, truthfulqa
from .rows import HubTable, check_row, file_rows


@dataclass(frozen=True)
class TextTask:
    """A data set's format: the default source of rows, their fields, and the scoring of answers.

    fields: required in each row; example: (name, row) -> the prompt with its answers.
    metric: a key of METRICS; headline: the metric's score that tables show.
    """

    description: str
    hub: HubTable
    fields: Mapping[str, type]
    example: Callable[[str, Mapping[str, Any]], Example]
    metric: str
    headline: str
    max_new_tokens: int
    stop: tuple[str, ...]


def _longbench(name: str, subset: longbench.Subset) -> TextTask:
    return TextTask(
        description=f"LongBench {name}: {subset.metric}",
        hub=HubTable("Xnhyacinth/LongBench", name, "test"),
        fields=longbench.FIELDS,
        example=subset.example,
        metric=subset.metric,
        headline=subset.metric,
        max_new_tokens=subset.max_new_tokens,
        stop=subset.stop,
    )


TEXT_TASKS: dict[str, TextTask] = {
    "gsm8k": TextTask(
        description="grade school mathematics, 8 worked examples; exact match of the number",
        hub=HubTable("openai/gsm8k", "main", "test"),
        fields=gsm8k.FIELDS,
        example=gsm8k.example,
        metric="number",
        headline="exact_match_strict",
        max_new_tokens=256,
        stop=gsm8k.STOP,
    ),
    "truthfulqa": TextTask(
        description="questions that invite false answers; BLEU with the right and wrong ones",
        hub=HubTable("truthfulqa/truthful_qa", "generation", "validation"),
        fields=truthfulqa.FIELDS,
        example=truthfulqa.example,
        metric="truthful",
        headline="bleu_max",
        max_new_tokens=256,
        stop=truthfulqa.STOP,
    ),
} | {f"longbench-{name}": _longbench(name, s) for name, s in longbench.SUBSETS.items()}


@dataclass(frozen=True)
class Listed:
    """Examples in memory; every split has the same examples."""

    examples: tuple[Example, ...]

    def __call__(self, split: str, index: int) -> Example:
        """Example `index`; `split` has no meaning here."""
        return self.examples[index]


def text_task(name: str, data: str | Path | None = None) -> Task:
    """The task `name` of TEXT_TASKS over a local file, or over the hub's data without one."""
    entry = TEXT_TASKS[name]
    rows, digest = entry.hub.rows() if data is None else file_rows(data)
    checked = ((where, check_row(row, entry.fields, where)) for where, row in rows.items())
    examples = tuple(entry.example(where, row) for where, row in checked)
    return Task(
        name=name,
        description=entry.description,
        source=Listed(examples),
        metrics=(entry.metric,),
        headline=entry.headline,
        max_new_tokens=entry.max_new_tokens,
        size=len(examples),
        fingerprint=digest,
        plain=True,
        stop=entry.stop,
    )
