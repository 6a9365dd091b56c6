"""Zeros that launches count in and leave zero."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from duotone.kept import kept

# Counters per device: far more than launches that run at the same time can use.
COUNTERS = 1 << 20
_COUNTERS: dict[torch.device, _Counters] = {}


class _Counters:
    """Ring of zeros; every launch takes the next ones and leaves them zero."""

    def __init__(self, device: torch.device) -> None:
        made = partial(torch.zeros, COUNTERS, dtype=torch.int32, device=device)
        self.zeros, self.next = kept(made, device), 0
        self.address = self.zeros.data_ptr()

    def take(self, count: int) -> int:
        """Address of `count` zeros that no launch shortly before or after uses."""
        if self.next + count > COUNTERS:
            self.next = 0
        taken = self.address + self.zeros.element_size() * self.next
        self.next += count
        return taken


def counters(device: torch.device, count: int) -> tuple[int, Tensor]:
    """Zeros that a launch leaves zero: they need no clearing before the next launch.

    Returns their address, and a tensor that holds them until it is launched.
    A captured graph keeps its zeros. Without a launch before the capture there is no ring yet, and
    the graph clears counters of its own.
    """
    capturing = device not in _COUNTERS and torch.cuda.is_current_stream_capturing()
    if capturing or count > COUNTERS:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        return zeros.data_ptr(), zeros
    prepare(device)
    ring = _COUNTERS[device]
    return ring.take(count), ring.zeros


def prepare(device: torch.device) -> None:
    """Allocate the ring of a device, unless there is one: before a graph is captured."""
    if device not in _COUNTERS:
        _COUNTERS[device] = _Counters(device)
