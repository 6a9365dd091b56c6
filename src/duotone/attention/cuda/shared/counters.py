"""Zeros that launches count in and leave zero."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor

from duotone.tools.kept import kept

# Counters of a ring: far more than launches that run at the same time can use.
COUNTERS = 1 << 20
_COUNTERS: dict[torch.device, _Counters] = {}


class _Ring:
    """Addresses of zeros; every launch takes the next ones and leaves them zero."""

    def __init__(self, zeros: Tensor) -> None:
        self.address, self.bytes_each = zeros.data_ptr(), zeros.element_size()
        self.next, self._lock = 0, threading.Lock()

    def take(self, count: int) -> int:
        """Address of `count` zeros that no launch shortly before or after takes."""
        with self._lock:
            first = 0 if self.next + count > COUNTERS else self.next
            self.next = first + count
        return self.address + self.bytes_each * first


class _Counters:
    """Zeros of a device: a ring for launches that run once, one for those that are captured.

    A graph uses its zeros again at every replay. A launch in another stream must not have them.
    """

    def __init__(self, device: torch.device) -> None:
        made = partial(torch.zeros, 2 * COUNTERS, dtype=torch.int32, device=device)
        self.zeros = kept(made, device)
        self.once, self.captured = (_Ring(half) for half in self.zeros.split(COUNTERS))


def counters(device: torch.device, count: int) -> tuple[int, Tensor]:
    """Zeros that a launch leaves zero: they need no clearing before the next launch.

    Returns their address, and a tensor that holds them until it is launched.
    A captured graph keeps its zeros. Without a launch before the capture there is no ring yet, and
    the graph clears counters of its own.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if count > COUNTERS or (capturing and device not in _COUNTERS):
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        return zeros.data_ptr(), zeros
    prepare(device)
    known = _COUNTERS[device]
    ring = known.captured if capturing else known.once
    return ring.take(count), known.zeros


def prepare(device: torch.device) -> None:
    """Allocate the rings of a device, unless there are some: before a graph is captured."""
    if device not in _COUNTERS:
        _COUNTERS.setdefault(device, _Counters(device))
