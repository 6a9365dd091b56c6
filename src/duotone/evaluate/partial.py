"""Finished batches of an unfinished evaluation, in a file next to its results.

One line per batch, added when every scheme has done it: a run that is interrupted loses the batch
it was at and no more. Numbers come back bit by bit, so results are those of a run in one go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duotone import json_text
from duotone.resume import not_partial, noted

# Of the file and of what its numbers mean: other arithmetic needs another one.
# 2: a digest in each line.
FORMAT = 2
RUN = "evaluation"
SUFFIX = ".partial.jsonl"
Say = Callable[[str], None]


def identity(configurations: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """All that batches depend on, JSON-safe.

    configurations: by scheme. header: `provenance.stamp`; a result names one device and one set of
    versions, so batches of others cannot go into it. Whether the tree is dirty says nothing: a new
    result file may be what makes it so.
    """
    commit = (header["commit"] or "").removesuffix("+dirty")
    made_by = {"commit": commit, "versions": header["versions"], "device": header["device"]}
    return json.loads(json.dumps({"format": FORMAT, **made_by, "configurations": configurations}))


@dataclass
class Partial:
    """Finished batches of a run with this identity; a path of None keeps nothing.

    batches: {scheme: what it did}, one per batch, in order.
    """

    path: Path | None
    identity: Mapping[str, Any]
    batches: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        folder: Path | None,
        identity: Mapping[str, Any],
        schemes: Iterable[str],
        say: Say | None = None,
    ) -> Partial:
        """State that an earlier run of `schemes` left in `folder`, or a new one; `say` receives it.

        Errors: ValueError for a file that is not what such a run leaves.
        """
        if folder is None:
            return cls(None, identity)
        path = folder / _file_name(identity)
        kept = cls(path, identity, _read(path, identity, set(schemes)) if path.exists() else [])
        if say and kept.batches:
            say(f"going on from {path}, after {_batches(len(kept.batches))}")
        elif say and (others := _others(folder, path)):
            say(
                f"beginning anew: {others[0]} is of other schemes, settings, weights or versions. "
                "Give what it began with to go on with it, or remove it"
            )
        return kept

    def keep(self, batch: Mapping[str, Any]) -> None:
        """Add a finished batch to the file."""
        if self.path is not None:
            line = {"batch": len(self.batches) + 1, "schemes": batch}
            self._write(line | {"digest": _digest(line)})
        self.batches.append(dict(batch))

    def _write(self, *lines: Mapping[str, Any]) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = (self.identity, *lines)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def remove(self) -> None:
        """Remove the file: the results are written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def noted(self) -> AbstractContextManager[None]:
        """Run a block whose interruption carries a note of finished batches."""
        return noted(self._what_is_kept)

    def _what_is_kept(self) -> str:
        done = _batches(len(self.batches))
        if self.path is None:
            return f"{done} lost; with --out FOLDER they are kept, and the same command goes on"
        if not self.batches:
            return "nothing is kept yet, the first batch was not done"
        return f"{done} kept in {self.path}; the same command goes on there"


def _batches(count: int) -> str:
    return f"{count} finished {'batch' if count == 1 else 'batches'}"


def _file_name(identity: Mapping[str, Any]) -> str:
    task = next(iter(identity["configurations"].values()))["task"]
    return f"{task}-{_digest(identity)}{SUFFIX}"


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]


def _others(folder: Path, path: Path) -> list[Path]:
    """Partial files of the same task with another identity."""
    task = path.name.removesuffix(SUFFIX).rpartition("-")[0]
    return sorted(folder.glob(f"{task}-{'?' * 10}{SUFFIX}"))


def _read(path: Path, identity: Mapping[str, Any], schemes: set[str]) -> list[dict[str, Any]]:
    """The whole batches; the rest of an interrupted write is cut off the file."""
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    try:
        found, *lines = [json_text.loads(line) for line in whole.splitlines()] or [None]
        in_order = [line["batch"] for line in lines] == list(range(1, len(lines) + 1))
        batches = [dict(line["schemes"]) for line in lines]
        intact = all(line.pop("digest") == _digest(line) for line in lines)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise not_partial(RUN, path, f"a line that cannot be read ({error})") from error
    if not whole:
        path.unlink()
        return []
    if found != identity or not in_order:
        raise not_partial(RUN, path, "lines of another run")
    if missing := sorted(schemes.difference(*batches[:1])) if batches else []:
        reason = f"no batches of {missing[0]!r}, whose result was there when it began"
        raise not_partial(RUN, path, reason)
    if not intact:
        raise not_partial(RUN, path, "a line whose digest is another one's")
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return batches
