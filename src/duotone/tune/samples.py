"""Split of samples: for the search, and held out.

Tasks with splits of their own (the embedded ones) give the search their calibration split and the
report their evaluation split. The generators' seeds keep both disjoint, and the samples' names are
compared. In a file all splits are the same rows. The search takes the first rows. The report takes
later rows that share no picture with the first (no question, where there are no pictures).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from duotone.inference.encoded import EncodedPrompts
from duotone.tasks import Example, Task

AnyTask = Task | EncodedPrompts
SEARCH, HELD_OUT = "calibration", "heldout"


@dataclass(frozen=True)
class Picked:
    """A source of chosen examples of one split of another source, under any split's name."""

    source: object
    split: str
    indices: tuple[int, ...]

    def __call__(self, split: str, index: int) -> Example:
        """Example number `index` of the chosen ones."""
        return self.source(self.split, self.indices[index])


@dataclass(frozen=True)
class Parts:
    """A task's two disjoint parts, each a task of its own.

    evidence: that they are disjoint, JSON-safe; digests are of the samples' keys.
    """

    search: AnyTask
    heldout: AnyTask
    evidence: dict[str, Any]


def content_key(example: Example) -> str:
    """A digest of an example's pictures, or of its question where it has none."""
    digest = hashlib.sha256()
    for image in example.images:
        pixels = image.convert("RGB")
        digest.update(f"{pixels.size}".encode() + pixels.tobytes())
    if not example.images:
        digest.update(example.question.encode())
    return digest.hexdigest()[:16]


def _part(task: AnyTask, split: str, indices: Sequence[int]) -> AnyTask:
    if isinstance(task, EncodedPrompts):
        return task.part(indices)
    source = Picked(task.source, split, tuple(indices))
    return replace(task, source=source, size=len(indices))


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


def split_task(task: AnyTask, search: int, heldout: int) -> Parts:
    """`search` samples to search on and `heldout` disjoint ones to report on.

    Errors: ValueError where the task has too few, or where the parts are not disjoint.
    """
    if search < 1 or heldout < 1:
        raise ValueError(
            f"both parts need at least one sample, got {search} to search on and {heldout} held "
            "out; see --samples and --heldout"
        )
    if isinstance(task, EncodedPrompts):
        picked = _by_key
    else:
        picked = _by_split if task.size is None else _by_content
    first, second, keys, splits, rule = picked(task, search, heldout)
    common = set(keys[0]) & set(keys[1])
    if common:
        raise ValueError(
            f"held-out samples of {task.name!r} must be new to the search; {len(common)} are not"
        )
    evidence: dict[str, Any] = {"task": task.name, "data": task.fingerprint, "key": rule}
    for i, (part, rows) in enumerate((("search", first), ("heldout", second))):
        evidence |= {
            f"{part}_split": splits[i],
            f"{part}_samples": len(rows),
            f"{part}_rows": (rows[0], rows[-1]),
            f"{part}_digest": _digest(keys[i]),
        }
    return Parts(_part(task, splits[0], first), _part(task, splits[1], second), evidence)


def _by_split(task: Task, search: int, heldout: int):
    """Both parts from row 0 of their own splits, distinguished by the names of the samples."""
    rows = (range(search), range(heldout))
    splits = (SEARCH, HELD_OUT)
    keys = [
        [task.example(i, split).name for i in part]
        for part, split in zip(rows, splits, strict=True)
    ]
    return *rows, keys, splits, "name (the generator's seed)"


def _by_content(task: Task, search: int, heldout: int):
    """The first rows, and later rows with other pictures."""
    return _by_keys(task, lambda i: content_key(task.example(i, HELD_OUT)), search, heldout)


def _by_key(task: EncodedPrompts, search: int, heldout: int):
    """The first prompts, and later ones with other visual tokens."""
    return _by_keys(task, task.key, search, heldout)


def _by_keys(task: AnyTask, key_of: Callable[[int], str], search: int, heldout: int):
    """The first rows, and later rows with other keys."""
    if task.size < search + heldout:
        raise ValueError(
            f"{task.name!r} must have at least {search + heldout} samples, {search} to search on "
            f"and {heldout} held out, got {task.size}; give more, or lower --samples and --heldout"
        )
    keys = [key_of(i) for i in range(search)]
    seen = set(keys)
    others = ((i, key) for i in range(search, task.size) if (key := key_of(i)) not in seen)
    found = dict(islice(others, heldout))
    if len(found) < heldout:
        raise ValueError(
            f"{task.name!r} must have {heldout} samples after the first {search} whose pictures "
            f"(or questions) the search does not see, got {len(found)}; order the file by picture, "
            "or give smaller --samples and --heldout"
        )
    both = [keys, list(found.values())]
    return range(search), list(found), both, (HELD_OUT, HELD_OUT), "content of the pictures"
