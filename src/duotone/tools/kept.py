"""Allocate tensors that a process keeps for good on a device, in another thread.

While a compiler that makes CUDA graphs warms up, it takes all memory of a thread from a pool of its
own. A tensor there that outlives the warm-up is a fault to the compiler, and replays would
overwrite it. The pool belongs to one thread, so another thread allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import TypeVar

import torch

T = TypeVar("T")


def cached_once(make: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache`, but threads that call at the same time get one result, the first.

    Launches and graphs hold addresses of what is kept here. Nobody else would keep another result.
    """
    made: dict[tuple, T] = {}

    @wraps(make)
    def call(*args: Hashable) -> T:
        if (found := made.get(args)) is None:
            found = made.setdefault(args, make(*args))
        return found

    call.cache_clear = made.clear
    return call


def kept(make: Callable[[], T], device: torch.device) -> T:
    """The result of `make`, outside of any pool of the current thread, ready for every stream.

    make: allocates on `device`. Inside a capture it runs in place: no other memory can be had.
    Inference mode does not reach it, for steps with gradients read what is kept as well.
    """
    if device.type != "cuda" or is_capturing(device):
        with torch.inference_mode(False):
            return make()
    return in_another_thread(lambda: _made_ready(make, device))


def is_capturing(device: torch.device) -> bool:
    """True where launches are captured: tensors that they make are empty until the first replay.

    Nothing may remember such a tensor, for a capture that breaks off is never replayed.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def in_another_thread(make: Callable[[], T]) -> T:
    """The result of `make`, or its exception."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(make).result()


def _made_ready(make: Callable[[], T], device: torch.device) -> T:
    with torch.cuda.device(device):
        made = make()
        torch.cuda.current_stream(device).synchronize()
    return made
