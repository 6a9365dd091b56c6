"""Kernel launches of one call, made again for other tensors of its shapes.

To choose and prepare the launches of a decode step takes Python far longer than a device needs to
run them. Only addresses of inputs differ from step to step. So the first call is recorded: its
launches, and the places in their arguments where these addresses are.

Only launches can be recorded. A call in which torch computes something is made as ever.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing: they allocate, or look at a tensor in another way.
ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
LOOKS = frozenset(
    {
        *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze"),
        *("t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
    }
)
# Kernels read and write rows in vectors of so many bytes.
ALIGNMENT_BYTES = 16
ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)

_LOCAL = threading.local()


class Prepared(Protocol):
    """A launch with all of its settings; `arguments` is the structure that the kernel gets."""

    arguments: ctypes.Structure

    def __call__(self, stream: int) -> None:
        """Launch on a stream, by its handle."""
        ...


class Recording:
    """Launches of a call so far. is_whole: False where the call does more than these."""

    def __init__(self) -> None:
        self.launches: list[Prepared] = []
        self.is_whole = True


def recording() -> Recording | None:
    """The recording of this thread, if there is one."""
    return getattr(_LOCAL, "recording", None)


def spoil() -> None:
    """Say that this call launches kernels that cannot be recorded."""
    if (current := recording()) is not None:
        current.is_whole = False


class Scratch:
    """Tensors that recorded calls share, one call after the other.

    Calls of one stream may share them where other kernels run in between.
    """

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def take(self, key: Hashable, made: Tensor) -> Tensor:
        """The tensor of this key; `made` where there is none."""
        return self._tensors.setdefault(key, made)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self._tensors.values())


class RecordedCall:
    """A call that is recorded once and then repeated.

    scratch: takes the place of what the call allocates.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self._launches: list[Prepared] | None = None
        self._key: Hashable = None

    @property
    def is_recorded(self) -> bool:
        """True where later calls are repetitions."""
        return bool(self._launches)

    def __call__(self, body: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The result of `body(*inputs)`.

        body: launches kernels, and returns a tensor that it has allocated; always one function.
        inputs: on one CUDA device.
        """
        if self._launches is None and not torch.cuda.is_current_stream_capturing():
            return self._record(body, inputs)
        if not self._launches or self._key != _key_of(inputs):
            return body(*inputs)
        return self._repeat(inputs)

    def _repeat(self, inputs: Sequence[Tensor]) -> Tensor:
        shape, stride, dtype = self._result
        device = inputs[0].device
        result = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for x, slots in zip((*inputs, result), self._slots, strict=True):
            address = x.data_ptr()
            for slot in slots:
                slot.value = address
        with on_device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            for launch in self._launches:
                launch(stream)
        return result

    def _record(self, body: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        made = _LOCAL.recording = Recording()
        try:
            with _Watch(self.scratch, made) as watch:
                result = body(*inputs)
        finally:
            _LOCAL.recording = None
        self._slots = [_slots(made.launches, x.data_ptr()) for x in (*inputs, result)]
        is_new = watch.has_made(result)
        is_whole = made.is_whole and is_new and all(self._slots)
        self._launches = made.launches if is_whole else []
        self._key = _key_of(inputs)
        self._result = (result.shape, result.stride(), result.dtype)
        # The next call writes to what is in scratch.
        return result.clone() if is_new else result


class _Watch(TorchDispatchMode):
    """Sees the operations of torch; allocations come from scratch."""

    def __init__(self, scratch: Scratch, recording: Recording) -> None:
        super().__init__()
        self.scratch, self.recording = scratch, recording
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in ALLOCATES:
            key = (len(self._made), made.shape, made.dtype, made.device)
            made = self.scratch.take(key, made)
            self._made.append(made)
        elif name not in LOOKS:
            self.recording.is_whole = False
        return made

    def has_made(self, x: Tensor) -> bool:
        """True for a tensor that begins where one of ours does."""
        return any(x.data_ptr() == made.data_ptr() for made in self._made)


def _key_of(inputs: Sequence[Tensor]) -> Hashable:
    """All that launches depend on, except addresses; None where these are not aligned."""
    if any(x.data_ptr() % ALIGNMENT_BYTES for x in inputs):
        return None
    shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
    return (shapes, torch.are_deterministic_algorithms_enabled())


def _slots(launches: Sequence[Prepared], address: int) -> list[ctypes.c_void_p]:
    """Places in the arguments that hold an address."""
    found = []
    for launch in launches:
        begin = ctypes.addressof(launch.arguments)
        for at in range(0, ctypes.sizeof(launch.arguments), ADDRESS_BYTES):
            slot = ctypes.c_void_p.from_address(begin + at)
            if slot.value == address:
                found.append(slot)
    return found


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which launches go to a device."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
