"""Capture launches in a CUDA graph, and replay them.

A capture is made in a stream of its own and takes its memory from a pool of its own. Other threads
go on working meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        with torch.cuda.device(device), _no_collection():
            before = torch.cuda.memory_reserved(device)
            here, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            apart.wait_stream(here)
            with torch.cuda.stream(apart), _capturing(self._graph):
                self.result = body()
            here.wait_stream(apart)
            self.nbytes = max(torch.cuda.memory_reserved(device) - before, 0)

    def replay(self) -> None:
        """Run the launches again, in the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()


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
