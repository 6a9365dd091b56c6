"""Runs that go on where an interrupted one ended.

A run keeps its work in a folder: the run's identity, and one file per finished part. The identity
is all that the work depends on, with a FORMAT of its arithmetic. Another identity is refused, never
overwritten. A part is written at once and has a checksum, so an interruption loses the part that
the run was at and no more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from duotone.tools import json_text, tensor_file

SUFFIX = ".partial"
IDENTITY = "identity.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Unfinished:
    """Finished parts of a run; a folder of None keeps nothing.

    identity: all that the parts depend on, JSON-safe. run: its name in errors, e.g. "quantization".
    part: name of a part in files and errors, e.g. "unit". steps: what notes count, e.g. "units".
    """

    folder: Path | None
    identity: Mapping[str, Any]
    run: str
    part: str
    steps: str

    def check(self) -> None:
        """Check what an earlier run left, if it left something.

        Errors: ValueError for a folder of another run or of another origin, which is never removed.
        """
        if self.folder is None or not self.folder.exists():
            return
        found, given = self.found_identity(), json.loads(json.dumps(self.identity))
        if found != given:
            raise ValueError(
                f"a {self.run} goes on with the identity it began with; {str(self.folder)!r} "
                f"differs in {differences(found, given)}. Give the former values or another --out, "
                "or remove the folder to begin again"
            )

    def found_identity(self) -> dict[str, Any]:
        """Read the identity of an earlier run. Errors: ValueError for a folder without one."""
        try:
            found = json_text.loads((self.folder / IDENTITY).read_bytes())
            if not isinstance(found, dict):
                raise ValueError(f"{IDENTITY} is no JSON object")
            return found
        except (OSError, ValueError) as error:
            raise not_partial(self.run, self.folder, error) from error

    def keep(
        self, number: int, data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write a part; a reader sees all of it or nothing. data: JSON-safe."""
        if self.folder is None:
            return
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            (self.folder / IDENTITY).write_text(json.dumps(self.identity), encoding="utf-8")
        on_host = {name: x.cpu().contiguous() for name, x in (tensors or {}).items()}
        tensor_file.write(self._file(number), on_host, data, self.part)

    def has(self, number: int) -> bool:
        """True where an earlier run has left this part."""
        return self.folder is not None and self._file(number).exists()

    def read(self, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the data and the tensors of a part. Errors: ValueError naming a damaged file."""
        with self.reading(number):
            return tensor_file.read(self._file(number), self.part, f"a {self.part} of a {self.run}")

    def reading(self, number: int) -> AbstractContextManager[None]:
        """Turn errors that a part's content causes inside the block into a ValueError naming it."""
        again = "cannot be gone on with, remove it to do it again"
        return tensor_file.damage_named(f"{self._file(number)} {again}")

    def remove(self) -> None:
        """Remove the folder: the run is finished, or begins again."""
        if self.folder is not None and self.folder.exists():
            shutil.rmtree(self.folder)

    def going_on(self, done: int, total: int) -> str:
        """Say what an earlier run has done."""
        return f"going on from {self.folder}: {done} of {total} {self.steps} are done"

    def note(self, done: int, total: int) -> str | None:
        """Say what an interruption leaves; None where nothing was to be kept.

        done: steps whose work is in files.
        """
        if self.folder is None:
            return None
        if not done:
            return f"nothing is kept yet, the first of {total} {self.steps} was not done"
        return (
            f"{done} of {total} {self.steps} are kept in {self.folder}; the same command goes on "
            "there"
        )

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.part}-{number:04d}.safetensors"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Fields with other values, as "name: old -> new"."""
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return ", ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in changed)


def not_partial(run: str, path: Path, reason: object) -> ValueError:
    """Error for a file or folder that an interrupted run did not leave."""
    return ValueError(
        f"a partial file or folder must come from an interrupted {run}, got {str(path)!r}: "
        f"{reason}. Remove it to begin again, or give another --out"
    )


@contextmanager
def noted(kept: Callable[[], str | None]) -> Iterator[None]:
    """Work whose interruption carries a note of `kept()`; None for no note."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if note := kept():
            interrupt.add_note(f"interrupted: {note}")
        raise
