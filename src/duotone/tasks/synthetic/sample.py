"""Result of every generator, and the seed ranges of the splits.

A generator is a pure function of one integer. Training, calibration and evaluation draw from
disjoint seed ranges, so splits share no seed. The spaces of the contents (positions, colours,
random names and codes) are so large that a repeat by chance is not expected.
"""

from dataclasses import dataclass, field

from PIL import Image

TRAIN_SEEDS = range(10**9)
HELD_OUT_SEEDS = range(10**9, 2 * 10**9)
CALIBRATION_SEEDS = range(2 * 10**9, 3 * 10**9)


@dataclass(frozen=True)
class Turn:
    """One question about the pictures; every string in `answers` is accepted."""

    question: str
    answers: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Mark:
    """A label in a picture: a letter at a point, or a word that holds for a disc."""

    label: str
    x: float
    y: float
    radius: float = 0.0
    picture: int = 0


@dataclass(frozen=True)
class Sample:
    """Pictures, the turns asked about them, the objects a caption may name, and all marks.

    Marks are for training only and label every position of a picture.
    """

    images: list[Image.Image]
    turns: list[Turn]
    objects: frozenset[str] = field(default_factory=frozenset)
    marks: list[Mark] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Turn]:
        """Return the turns of one kind, in order."""
        return [turn for turn in self.turns if turn.kind == kind]


def join(parts: list[str]) -> str:
    """Join noun phrases as English does: `a`, `a and b`, `a, b and c`."""
    if len(parts) == 1:
        return parts[0]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def with_article(phrase: str) -> str:
    """Put `a` or `an` before a noun phrase."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase
