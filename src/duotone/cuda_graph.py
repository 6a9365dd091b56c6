"""Capture launches in a CUDA graph, and replay them.

Captures of a device are made in one stream, one after the other, and each takes its memory from a
pool of its own. Other threads go on working meanwhile. Workspaces of cuBLAS belong to a stream and
a thread and outlive a capture, so they are allocated before it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch


class CudaGraph:
    """Launches of one call of `body`, which has not run yet.

    body: asks the device for nothing and allocates nothing that outlives it, except its result.
    result: of `body`; `replay` writes its tensors. nbytes: device memory that the graph holds.
    Errors: of `body`, and RuntimeError from torch for anything that a capture does not allow; then
    nothing has run.
    """

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        with _LOCK, torch.cuda.device(device), _no_collection():
            here, apart = torch.cuda.current_stream(device), _stream(device)
            apart.wait_stream(here)
            _prepare(apart)
            before = torch.cuda.memory_reserved(device)
            with torch.cuda.stream(apart), _capturing(self._graph):
                self.result = body()
            here.wait_stream(apart)
            self.nbytes = max(torch.cuda.memory_reserved(device) - before, 0)

    def replay(self) -> None:
        """Run the launches again, in the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()


_LOCK = threading.Lock()
_LOCAL = threading.local()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _prepare(stream: torch.cuda.Stream) -> None:
    """Multiply two small matrices in a stream, once per thread: cuBLAS then has its workspace."""
    prepared = _LOCAL.__dict__.setdefault("streams", set())
    if stream in prepared:
        return
    with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
        for dtype in (torch.float16, torch.float32):
            some = torch.ones(16, 16, dtype=dtype, device=stream.device)
            torch.mm(some, some)
    prepared.add(stream)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        # The stream leaves its capture in any case; why it broke off is known already.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: its destructors may do what a capture does not allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
