"""One step at a time: threads that run one model wait for each other.

What modules of a quantized model tell each other in a step, they keep in themselves.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch import nn

# How long to wait before looking whether who should end a step still runs it.
PATIENCE_S = 1.0


class Turns:
    """A lock from a step's begin to its end, which whoever was interrupted in between loses.

    torch calls no hook after a KeyboardInterrupt, so that a step may have begun and never end.
    """

    def __init__(self) -> None:
        self._lock, self._taking_over = threading.Lock(), threading.Lock()
        self._owner: int | None = None

    def __reduce__(self) -> Any:
        # Of a deep copy, or a model that was saved whole: nobody runs it.
        return Turns, ()

    def begin(self, module: nn.Module) -> None:
        """Wait until no other thread runs `module`."""
        me = threading.get_ident()
        if self._owner == me:
            return
        while not self._lock.acquire(timeout=PATIENCE_S):
            if self._took_over(module):
                return
        self._owner = me

    def _took_over(self, module: nn.Module) -> bool:
        """True if nobody would have released the lock, and this thread has it now."""
        with self._taking_over:
            owner = self._owner  # None: it is just being taken or given back
            if owner is None or _runs(owner, module):
                return False
            self._owner = threading.get_ident()
            return True

    @property
    def is_mine(self) -> bool:
        """True if this thread has begun."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """The next one may begin."""
        self._owner = None
        self._lock.release()


def _runs(thread: int | None, module: nn.Module) -> bool:
    """True if a thread is executing a method of `module`."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
