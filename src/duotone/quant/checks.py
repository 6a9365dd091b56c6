"""Checks that read a tensor on the host, and where they must not run.

Bad numbers raise where they enter a cache. Such a check waits for the device, which a decode step
that is captured or compiled cannot do: there a bad number becomes NaN in scales and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECKED: ContextVar[bool] = ContextVar("duotone_checked", default=True)


def checked() -> bool:
    """Checks of values may wait for the device here."""
    return _CHECKED.get()


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside the block no check of values runs."""
    token = _CHECKED.set(False)
    try:
        yield
    finally:
        _CHECKED.reset(token)
