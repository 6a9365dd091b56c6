"""What a process keeps for good on a device is allocated apart from what a thread runs.

A compiler that makes CUDA graphs lets all memory that a thread asks for come from a pool of its
own while it warms up. What outlives the warm-up there is a fault to it, and would be overwritten
by replays. The pool is one thread's, so another thread allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def kept(make: Callable[[], T], device: torch.device) -> T:
    """The result of `make`, outside of any pool of the current thread, ready for every stream.

    make: allocates on `device`. Inside a capture it runs in place: no other memory can be had.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    return in_another_thread(lambda: _made_ready(make, device))


def in_another_thread(make: Callable[[], T]) -> T:
    """The result of `make`, or its exception."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(make).result()


def _made_ready(make: Callable[[], T], device: torch.device) -> T:
    with torch.cuda.device(device):
        made = make()
        torch.cuda.current_stream(device).synchronize()
    return made
