"""Tasks as data: the source of examples and the scoring of answers.

Knows neither models nor caches: an example becomes chat messages, an answer is a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from .metrics import (
    Score,
    accuracy,
    anls,
    caption_scores,
    need_pycocoevalcap,
    object_scores,
)

SPLITS = ("heldout", "calibration", "train")


@dataclass(frozen=True)
class Example:
    """One question, about some pictures or none; every string in `answers` is accepted."""

    name: str
    images: tuple[Image.Image, ...]
    question: str
    answers: tuple[str, ...]
    objects: frozenset[str] = field(default_factory=frozenset)

    def messages(self) -> list[dict[str, Any]]:
        """Chat messages for `processor.apply_chat_template`: the pictures, then the question."""
        pictures = [{"type": "image", "image": image} for image in self.images]
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": self.question}]}]

    def without_images(self) -> "Example":
        """Copy without pictures, which is kept for scoring."""
        return replace(self, images=())


Scorer = Callable[[Sequence[Example], Sequence[str]], dict[str, Score]]


def _answers(examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """Accepted answers of every example. Errors: ValueError where one has none."""
    if bare := [example.name for example in examples if not example.answers]:
        raise ValueError(f"scored examples must have answers, got none for {bare[0]!r}")
    return [example.answers for example in examples]


METRICS: dict[str, Scorer] = {
    "accuracy": lambda examples, texts: {"accuracy": accuracy(texts, _answers(examples))},
    "anls": lambda examples, texts: {"anls": anls(texts, _answers(examples))},
    "captions": lambda examples, texts: caption_scores(texts, _answers(examples)),
    "objects": lambda examples, texts: object_scores(texts, [e.objects for e in examples]),
}


@dataclass(frozen=True)
class Task:
    """A named source of examples with its metrics.

    source: (split, index) -> Example, a pure function, so that worker processes can render.
    metrics: keys of METRICS; headline: the score that tables show.
    size: number of examples, None for an endless source. fingerprint: changes with the data.
    """

    name: str
    source: Callable[[str, int], Example]
    metrics: tuple[str, ...]
    headline: str
    max_new_tokens: int
    size: int | None = None
    fingerprint: str = ""

    def __post_init__(self):
        unknown = sorted(set(self.metrics) - set(METRICS))
        if unknown or not self.metrics:
            raise ValueError(f"metrics must be among {sorted(METRICS)}, got {list(self.metrics)}")

    def example(self, index: int, split: str = "heldout") -> Example:
        """Example `index` of a split; the same one on every machine."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        if index < 0 or (self.size is not None and index >= self.size):
            raise ValueError(f"task {self.name!r} has {self.size} examples, got index {index}")
        return self.source(split, index)

    def check_samples(self, samples: int) -> None:
        """Raise unless the task can give that many examples."""
        if samples < 1 or (self.size is not None and samples > self.size):
            raise ValueError(
                f"samples must be between 1 and the task's {self.size or 'unlimited'} examples, "
                f"got {samples}"
            )

    def check_metrics(self) -> None:
        """Raise ImportError where a metric needs a package that is not installed."""
        if "captions" in self.metrics:
            need_pycocoevalcap()

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, Score]:
        """All metrics of the predictions, by name."""
        scores = {}
        for metric in self.metrics:
            scores |= METRICS[metric](examples, predictions)
        return scores
