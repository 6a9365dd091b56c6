"""Checks that read a tensor on the host, and where they must not run.

Bad numbers raise where they enter a cache. Such a check waits for the device. A captured or
compiled decode step cannot wait: there a bad number becomes NaN in scales and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECKED: ContextVar[bool] = ContextVar("duotone_checked", default=True)


def checked() -> bool:
    """True where checks of values may wait for the device."""
    return _CHECKED.get()


@contextmanager
def unchecked() -> Iterator[None]:
    """Run no check of values inside the block."""
    token = _CHECKED.set(False)
    try:
        yield
    finally:
        _CHECKED.reset(token)
