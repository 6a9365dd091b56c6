"""Turns of threads that share one model: one step at a time, the least used thread next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Turns:
    """Clock and order of `count` lanes, a thread each.

    Only one lane runs at a time. The lane that has used the least time of its own goes next, so
    that a slower lane is seen to be slower. Waiting does not count.
    """

    def __init__(self, count: int) -> None:
        self.seconds = [0.0] * count
        self._left = set(range(count))
        self._running: int | None = None
        self._started = 0.0
        self._changed = threading.Condition()

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        """Inside, this thread is a lane, and begins with its first turn."""
        try:
            self._take(index)
            yield
        finally:
            with self._changed:
                self._stop(index)
                self._left.discard(index)
                self._changed.notify_all()

    @contextmanager
    def paused(self, index: int) -> Iterator[None]:
        """Inside, the lane's clock stands still; after it, another lane may go first."""
        with self._changed:
            self.seconds[index] += perf_counter() - self._started
        self._started = perf_counter()
        yield
        with self._changed:
            self._running = None
            self._changed.notify_all()
        self._take(index)

    def _take(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_next(index))
            self._running, self._started = index, perf_counter()

    def _stop(self, index: int) -> None:
        if self._running == index:
            self.seconds[index] += perf_counter() - self._started
            self._running = None

    def _is_next(self, index: int) -> bool:
        return self._running is None and index == min(
            self._left, key=lambda lane: (self.seconds[lane], lane)
        )
