"""Checks that read a tensor on the host, and where they must not run.

Bad numbers raise where they enter a cache. Such a check waits for the device. A captured or
compiled decode step cannot wait: there a bad number becomes NaN in scales and output. Kernels that
pack a prompt put their checks off to the end of the step: layers would wait one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool
from torch import Tensor

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


class Checks:
    """Checks that are put off, to be made with one wait for the device."""

    def __init__(self) -> None:
        self._flags: list[Bool[Tensor, ""]] = []
        self._errors: list[str] = []

    def add(self, flag: Bool[Tensor, ""], error: str) -> None:
        """Put one off. error: what `settle` raises where `flag` is False."""
        self._flags.append(flag)
        self._errors.append(error)

    def settle(self) -> None:
        """Make all checks. Errors: ValueError of the first that fails; none is left then."""
        if not self._flags:
            return
        flags, errors = self._flags, self._errors
        self._flags, self._errors = [], []
        held = torch.stack(flags).tolist()
        if not all(held):
            raise ValueError(errors[held.index(False)])


_LATER: ContextVar[Checks | None] = ContextVar("duotone_later", default=None)


@contextmanager
def put_off(checks: Checks) -> Iterator[None]:
    """Inside the block, `holds` puts its checks off to `checks`."""
    token = _LATER.set(checks)
    try:
        yield
    finally:
        _LATER.reset(token)


def holds(flag: Bool[Tensor, ""], error: str) -> bool:
    """The flag, or True where nobody checks, or checks later."""
    if not checked():
        return True
    if (later := _LATER.get()) is None:
        return bool(flag)
    later.add(flag, error)
    return True


NOT_FINITE = (
    "only finite values whose levels fit fp16 can be quantized; got others in K or V of a picture. "
    "Check the model's output before the cache."
)
