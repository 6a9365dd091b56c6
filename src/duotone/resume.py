"""Runs that go on where an interrupted one ended: identities, notes, refusals.

A run keeps its work in a file or folder that names the run's identity. The identity is all that the
work depends on, with a FORMAT of its arithmetic. Another identity is refused, never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Fields with other values, as "name: old -> new"."""
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return ", ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in changed)


def check_identity(
    run: str, path: Path, found: Mapping[str, Any], given: Mapping[str, Any], again: str
) -> None:
    """Refuse to go on with another run's work.

    run: its name in the error. again: how to begin again. Errors: ValueError with the differences.
    """
    if found != given:
        raise ValueError(
            f"a {run} goes on with the identity it began with; {str(path)!r} differs in "
            f"{differences(found, given)}. Give the former values or another --out, or {again}"
        )


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
