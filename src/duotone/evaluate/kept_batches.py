"""Finished batches of an unfinished evaluation, in a folder next to its results.

A file per batch, written when every scheme has done it. Numbers come back bit by bit, so results
are those of a run in one go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from duotone.tools.resume import SUFFIX, Say, Unfinished, not_partial, noted

# Of the files and of what their numbers mean: other arithmetic needs another one.
# 3: a file per batch.
FORMAT = 3
RUN = "evaluation"


def identity(configurations: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """All that batches depend on, JSON-safe.

    configurations: by scheme. header: `provenance.stamp`; a result names one device and one set of
    versions, so batches of others cannot go into it. Whether the tree is dirty says nothing: a new
    result file may be what makes it so.
    """
    commit = (header["commit"] or "").removesuffix("+dirty")
    made_by = {"commit": commit, "versions": header["versions"], "device": header["device"]}
    return json.loads(json.dumps({"format": FORMAT, **made_by, "configurations": configurations}))


class Batches:
    """Work of the schemes, batch by batch: {scheme: what it did}, in order.

    out: folder of the results; None keeps nothing. identity: of the run. schemes: labels of those
    that run. total: batches in all. say: receives a sentence where a run goes on, or cannot.
    Errors: ValueError for a folder that such a run has not left.
    """

    def __init__(
        self,
        out: Path | None,
        identity: Mapping[str, Any],
        schemes: Iterable[str],
        total: int,
        say: Say | None = None,
    ) -> None:
        folder = None if out is None else out / _folder_name(identity)
        self.kept = Unfinished(folder, identity, RUN, "batch", "batches")
        self.kept.check()
        self.total = total
        self.done = [self.kept.read(n)[0] for n in takewhile(self.kept.has, count(1))]
        if missing := sorted(set(schemes).difference(*self.done[:1])) if self.done else []:
            reason = f"no batches of {missing[0]!r}, whose result was there when it began"
            raise not_partial(RUN, folder, reason)
        if say and self.done:
            say(self.kept.going_on(len(self.done), total))
        elif say and (others := _others(folder)):
            say(
                f"beginning anew: {others[0]} is of other schemes, settings, weights or versions. "
                "Give what it began with to go on with it, or remove it"
            )

    def add(self, batch: Mapping[str, Any]) -> None:
        """Keep a finished batch."""
        self.done.append(dict(batch))
        self.kept.keep(len(self.done), batch)

    def noted(self) -> AbstractContextManager[None]:
        """Run a block whose interruption carries a note of finished batches."""
        return noted(lambda: self.kept.note(len(self.done), self.total) or self._lost())

    def remove(self) -> None:
        """Remove the folder: the results are written."""
        self.kept.remove()

    def _lost(self) -> str:
        number = len(self.done)
        done = f"{number} finished {'batch' if number == 1 else 'batches'}"
        return f"{done} lost; with --out FOLDER they are kept, and the same command goes on"


def _folder_name(identity: Mapping[str, Any]) -> str:
    task = next(iter(identity["configurations"].values()))["task"]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    return f"{task}-{digest}{SUFFIX}"


def _others(folder: Path | None) -> list[Path]:
    """Folders that runs of this task with another identity have left."""
    if folder is None:
        return []
    task = folder.name.removesuffix(SUFFIX).rpartition("-")[0]
    return sorted(folder.parent.glob(f"{task}-{'?' * 10}{SUFFIX}"))
