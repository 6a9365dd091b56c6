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
from jaxtyping import Float
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
        self._totals: list[Float[Tensor, ""]] = []
        self._errors: list[str] = []

    def add(self, total: Float[Tensor, ""], error: str) -> None:
        """Put one off. error: what `settle` raises where `total` is not finite."""
        self._totals.append(total)
        self._errors.append(error)

    def settle(self) -> None:
        """Make all checks. Errors: ValueError of the first that fails; none is left then."""
        if not self._totals:
            return
        totals, errors = self._totals, self._errors
        self._totals, self._errors = [], []
        # Layers of one model may be on several devices.
        together = torch.stack([total.to(totals[0].device) for total in totals])
        finite = together.isfinite().tolist()
        if not all(finite):
            raise ValueError(errors[finite.index(False)])


_LATER: ContextVar[Checks | None] = ContextVar("duotone_later", default=None)


@contextmanager
def put_off(checks: Checks) -> Iterator[None]:
    """Inside the block, `is_finite` puts its checks off to `checks`."""
    token = _LATER.set(checks)
    try:
        yield
    finally:
        _LATER.reset(token)


def is_finite(total: Float[Tensor, ""], error: str) -> bool:
    """True for a finite number, and where nobody checks, or checks later.

    total: of numbers of 16 bits in fp32, which is finite if all of them are.
    """
    if not checked():
        return True
    if (later := _LATER.get()) is None:
        return bool(total.isfinite())
    later.add(total, error)
    return True


_RULE = "only finite values whose levels fit fp16 can be quantized; got others in K or V"
_REMEDY = "Check the model's output before the cache."
NOT_FINITE = f"{_RULE} of a picture. {_REMEDY}"
STREAM_NOT_FINITE = f"{_RULE} of the text stream. {_REMEDY}"
