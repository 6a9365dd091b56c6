"""Answers of several sides to equal questions: scores, equal answers, paired differences."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duotone.evaluate.run import same_token_share
from duotone.tasks import Example, Task
from duotone.tasks.metrics import Score, confidence_interval, paired_difference

DENSE = "16 bit"
# (Token ids, the end's included; text) of each answer.
Answers = list[tuple[list[int], str]]


class Side(NamedTuple):
    """A way to ask. served: by vLLM, or else in memory. later: the question after the pictures."""

    served: bool
    later: bool
    width: str

    def __str__(self) -> str:
        """Name in results."""
        way = "vLLM" if self.served else "in memory"
        return f"{way}, {self.width}{', question later' if self.later else ''}"


def pairs_of(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Few bits with 16 bit, and vLLM with memory, where all else is equal."""
    few = [(x, x._replace(width=DENSE)) for x in sides if x.width != DENSE]
    return few + [(x, x._replace(served=False)) for x in sides if x.served]


def compared(
    task: Task, examples: Sequence[Example], sides: Mapping[Side, Answers]
) -> dict[str, Any]:
    """Scores of a task's sides, and of their pairs: equal answers, tokens, paired difference."""
    texts = {side: [text for _, text in answers] for side, answers in sides.items()}
    scores = {side: task.score(examples, x)[task.headline] for side, x in texts.items()}
    return {
        "task": task.name,
        "headline": task.headline,
        "samples": len(examples),
        "scores": {str(side): confidence_interval(x).to_dict() for side, x in scores.items()},
        "pairs": [
            {"of": str(a), "to": str(b), **_pair((sides[a], sides[b]), (scores[a], scores[b]))}
            for a, b in pairs_of([*sides])
        ],
        "answers": [
            {"name": x.name, "question": x.question, "answers": list(x.answers)}
            | {str(side): found[n] for side, found in texts.items()}
            for n, x in enumerate(examples)
        ],
    }


def _pair(answers: tuple[Answers, Answers], scores: tuple[Score, Score]) -> dict[str, Any]:
    both = [*zip(*answers, strict=True)]
    shares = [same_token_share(a, b) for (a, _), (b, _) in both]
    return {
        "same_answers": sum(a == b for (_, a), (_, b) in both),
        "same_tokens": sum(shares) / len(shares),
        "difference": paired_difference(*scores).to_dict(),
    }
