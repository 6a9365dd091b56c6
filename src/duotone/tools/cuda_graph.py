"""Capture launches in a CUDA graph, and replay them.

The driver captures, not torch. A capture of torch's makes the process's random generators part of
itself. One that breaks off leaves them there: then nobody in the process draws numbers any more.
Here a step that draws numbers is refused by torch, and no other thread notices a capture.

Captures of a device are made in one stream, one after the other. A graph's memory is a pool of its
own, which the next capture takes over once the graph is gone. Workspaces of cuBLAS belong to a
stream and a thread and outlive a capture, so they are allocated before it. Their pool stays. Others
may clear all workspaces of the process, as Inductor does, and replays go on using theirs.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class CudaGraph:
    """Launches of one call of `body`, which has not run yet.

    body: asks the device for nothing, draws no random numbers, and allocates nothing that outlives
    it, except its result.
    result: of `body`; `replay` writes its tensors. nbytes: device memory that the graph holds.
    Errors: of `body`, and RuntimeError for anything that a capture does not allow; then nothing
    has run.
    """

    _held: _Held | None = None

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        _check_allocator()
        with _LOCK, torch.cuda.device(device), _no_collection():
            self._device = torch.device("cuda", torch.cuda.current_device())
            here, apart = torch.cuda.current_stream(), _stream(self._device)
            _POOLS.take_back(release=False)
            self._held = _Held(_POOLS.take(self._device))
            if (last := self._held.pool.stream) is not None:
                # Its last graph may still run, on the same memory.
                here.wait_stream(last)
            apart.wait_stream(here)
            _prepare(apart)
            before = torch.cuda.memory_reserved()
            with torch.cuda.stream(apart), self._held.pool.allocating():
                self.result = self._held.capture(body, apart.cuda_stream)
            here.wait_stream(apart)
            self._held.pool.nbytes += max(torch.cuda.memory_reserved() - before, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the graph's pool."""
        return self._held.pool.nbytes

    def replay(self) -> None:
        """Run the launches again, in the current stream."""
        with torch.cuda.device(self._device):
            stream = self._held.pool.stream = torch.cuda.current_stream()
            self._held.launch(stream.cuda_stream)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The result goes first: its memory is the pool's.
        self.result = None
        # At the end of the process the modules that destroy it are gone.
        if self._held is not None and not is_ending():
            _POOLS.give(self._held)


@contextmanager
def before_captures() -> Iterator[None]:
    """Inside, graphs that are dropped leave their pools to the captures that follow."""
    with _LOCK:
        yield


class _Held:
    """A graph that can be launched, and the pool of its memory."""

    def __init__(self, pool: _Pool) -> None:
        self.pool, self._graph = pool, None

    def capture(self, body: Callable[[], Any], stream: int) -> Any:
        """The result of `body`, whose launches in `stream` are captured."""
        driver = _driver()
        # Other threads may allocate, wait and launch meanwhile.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _checked(driver.cuStreamBeginCapture(stream, mode))
        try:
            result = body()
        except BaseException:
            # The stream leaves its capture in any case; why it broke off is known already.
            status, graph = driver.cuStreamEndCapture(stream)
            if not int(status):
                driver.cuGraphDestroy(graph)
            raise
        graph = _checked(driver.cuStreamEndCapture(stream))
        try:
            self._graph = _checked(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)
        return result

    def launch(self, stream: int) -> None:
        """Launch the graph in a stream."""
        _checked(_driver().cuGraphLaunch(self._graph, stream))

    def destroy(self) -> None:
        """Destroy the graph; launches that are in flight end as they are."""
        if self._graph is not None:
            _driver().cuGraphExecDestroy(self._graph)
            self._graph = None


class _Pool:
    """A pool of torch's allocator, of graphs that live one after the other.

    nbytes: that captures have added to it. stream: in which its graphs were last launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0
        self.stream: torch.cuda.Stream | None = None
        self._id, self._is_known = torch.cuda.graph_pool_handle(), False

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Inside, this thread's tensors are in the pool."""
        index = self.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, self._id)
            # The first use counts as the pool's owner, which `release` ends.
            if self._is_known:
                torch._C._cuda_releasePool(index, self._id)
            self._is_known = True

    def release(self) -> None:
        """Let torch free the memory once it is short of it, or asked to (`empty_cache`)."""
        if self._is_known:
            torch._C._cuda_releasePool(self.device.index, self._id)


# A call of `generate` captures its step and its flush.
MOST_FREE = 2


class _Pools:
    """Pools of graphs that are gone, for the next captures of their device.

    Once no graph lives on a device, all but `MOST_FREE` of its pools go back to torch.
    """

    def __init__(self) -> None:
        # Graphs die in any thread at any time, also while another one is captured.
        self._dead: deque[_Held] = deque()
        self._free: dict[torch.device, list[_Pool]] = {}
        self._living: dict[torch.device, int] = {}

    def take(self, device: torch.device) -> _Pool:
        """A pool for one more graph. The caller holds the lock."""
        self._living[device] = self._living.get(device, 0) + 1
        free = self._free.get(device)
        return free.pop() if free else _Pool(device)

    def give(self, held: _Held) -> None:
        """Take a graph that is gone, now or at the next capture."""
        self._dead.append(held)
        if _LOCK.acquire(blocking=False):
            try:
                self.take_back()
            finally:
                _LOCK.release()

    def take_back(self, release: bool = True) -> None:
        """Destroy graphs that are gone and keep their pools. The caller holds the lock.

        release: False before a capture, which needs the pools again. Torch counts a pool that went
        back as reserved until it is short of memory: one for each change of a model would add up.
        """
        while self._dead:
            held = self._dead.popleft()
            held.destroy()
            device = held.pool.device
            free = self._free.setdefault(device, [])
            free.append(held.pool)
            self._living[device] -= 1
            while release and not self._living[device] and len(free) > MOST_FREE:
                free.pop(0).release()


_LOCK = threading.Lock()
_POOLS = _Pools()


@cache
def _driver() -> Any:
    """CUDA's driver API. Errors: RuntimeError where its bindings are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "CUDA graphs need the package cuda-bindings; got none. pip install 'duotone[cuda]'"
        ) from error
    return driver


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Errors: RuntimeError with CUDA's name of the error."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"a CUDA graph failed: {status.name}")
    return values[0] if values else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _check_allocator() -> None:
    """Raise RuntimeError for an allocator that has no pools."""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise RuntimeError(
            f"CUDA graphs need pools of PyTorch's native allocator; got {backend!r}. Leave the "
            "backend out of PYTORCH_CUDA_ALLOC_CONF."
        )


@cache
def _workspaces(device: torch.device) -> _Pool:
    return _Pool(device)


def _prepare(stream: torch.cuda.Stream) -> None:
    """Multiply two small matrices in a stream: cuBLAS then has its workspace for this thread."""
    kept = _workspaces(stream.device).allocating()
    with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad(), kept:
        for dtype in (torch.float16, torch.float32):
            some = torch.ones(16, 16, dtype=dtype, device=stream.device)
            torch.mm(some, some)


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
