"""Outputs of one scheme so far, and the result made from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duotone.tasks import Example, Task
from duotone.tasks.metrics import Score, tokenizer

from .forcing import forced_scores
from .records import result_data


@dataclass(frozen=True)
class Answered:
    """Outputs of one scheme for one batch, JSON-safe: answers, bytes, time.

    forced: rows [samples, 3] of `forced_agreement`, where measured.
    """

    token_ids: list[list[int]]
    texts: list[str]
    memory: dict[str, float]
    seconds: float
    forced: list[list[float]] | None = None


@dataclass
class Run:
    """Answers, bytes and time of one scheme, batch by batch."""

    label: str
    spec: Any
    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    forced: list[np.ndarray] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, answered: Answered) -> None:
        """Add one more batch."""
        self.token_ids += answered.token_ids
        self.texts += answered.texts
        self.memory.append(answered.memory)
        self.seconds += answered.seconds
        if answered.forced is not None:
            self.forced.append(np.asarray(answered.forced))

    def scores(self, task: Task, examples: Sequence[Example], reference: "Run") -> dict[str, Score]:
        """Task metrics, agreement with the reference, and forced scores where measured."""
        scores = task.score(examples, self.texts) | answer_agreement(self, reference)
        return scores | (forced_scores(np.concatenate(self.forced)) if self.forced else {})


def same_token_share(ids: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with the same token, over the length of the longer answer."""
    same = sum(a == b for a, b in zip(ids, reference, strict=False))
    return same / max(len(ids), len(reference), 1)


def answer_agreement(run: Run, reference: Run) -> dict[str, Score]:
    """`same_answer`: share of equal texts; `same_tokens`: mean share of equal tokens."""
    same_text = [float(a == b) for a, b in zip(run.texts, reference.texts, strict=True)]
    pairs = zip(run.token_ids, reference.token_ids, strict=True)
    return {
        "same_answer": Score.mean(same_text),
        "same_tokens": Score.mean([same_token_share(a, b) for a, b in pairs]),
    }


def result_of(
    run: Run,
    scores: dict[str, Score],
    task: Task,
    header: dict[str, Any],
    configuration: dict[str, Any],
) -> dict[str, Any]:
    """The JSON of one scheme on one task: the task's metrics and the agreement with 16 bit."""
    samples, headline = len(run.texts), task.headline
    result = result_data(header, configuration, samples, headline, scores, run.memory, run.seconds)
    return result | {
        "caption_tokenizer": tokenizer.NAME if "captions" in task.metrics else None,
    }
