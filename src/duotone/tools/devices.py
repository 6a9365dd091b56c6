"""Facts of devices, asked once per process and device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch


class Facts(NamedTuple):
    """Compute capability of a device, and the number of its multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


# Stands for devices without CUDA, on which launches are only planned; kernels were tuned on it.
H200 = Facts((9, 0), 132)
_KNOWN: dict[int, Facts] = {}
_HERE: AbstractContextManager[Any] = nullcontext()


def facts(device: torch.device) -> Facts:
    """Facts of a device; those of an H200 where it is none of CUDA."""
    if device.type != "cuda":
        return H200
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _KNOWN:
        found = torch.cuda.get_device_properties(index)
        _KNOWN[index] = Facts((found.major, found.minor), found.multi_processor_count)
    return _KNOWN[index]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which launches go to a device."""
    if torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def stream_handle(index: int) -> int:
    """Handle of the current stream of a CUDA device, without the object that torch makes of it."""
    return torch._C._cuda_getCurrentRawStream(index)
