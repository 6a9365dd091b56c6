"""Pictures with questions that the embedded model was trained to answer: bundled, or drawn anew."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duotone.inference.compare import DEFAULT_QUESTION, EXAMPLES
from duotone.tasks.synthetic.sample import HELD_OUT_SEEDS

# {kind: the generator of `duotone.tasks.synthetic`}
KINDS = {"scene": "scenes", "document": "documents", "frames": "sequences"}
ANY_PICTURE = (
    DEFAULT_QUESTION,
    "How many objects are in the picture?",
    "What is the total?",
)


@dataclass(frozen=True)
class Entry:
    """One choice of the page: pictures that are shown together, and questions to suggest.

    questions: {question: answers that are right}; () where nobody knows.
    is_kept: False for pictures that make room for newer ones.
    """

    name: str
    files: tuple[Path, ...]
    questions: dict[str, tuple[str, ...]]
    is_kept: bool = False

    def to_dict(self, key: str) -> dict[str, Any]:
        """JSON-safe data for the page, without the answers."""
        return {
            "id": key,
            "name": self.name,
            "pictures": len(self.files),
            "questions": list(self.questions),
        }


def bundled() -> dict[str, Entry]:
    """Entries that ship with the package."""
    listed = json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8"))
    return {
        name: Entry(
            name,
            tuple(EXAMPLES / file for file in entry["files"]),
            {asked["question"]: tuple(asked["answers"]) for asked in entry["questions"]},
            is_kept=True,
        )
        for name, entry in listed.items()
    }


def drawn(kind: str, index: int, folder: Path) -> Entry:
    """Entry number `index` that no training saw, with its pictures in a folder.

    Errors: ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"a picture can be drawn of {', '.join(KINDS)}; got {kind!r}")
    generator = importlib.import_module(f"duotone.tasks.synthetic.{KINDS[kind]}")
    sample = generator.generate(HELD_OUT_SEEDS[index])
    files = [folder / f"{kind}-{index}-{i}.png" for i in range(len(sample.images))]
    for image, file in zip(sample.images, files, strict=True):
        image.save(file)
    # Transcripts of whole documents only serve the training.
    asked = [turn for turn in sample.turns if turn.kind != "transcript"]
    questions = {turn.question: tuple(turn.answers) for turn in asked}
    return Entry(f"new {kind}", tuple(files), questions)


def own(name: str, file: Path) -> Entry:
    """Entry of a picture of the user's own."""
    return Entry(name, (file,), dict.fromkeys(ANY_PICTURE, ()))
