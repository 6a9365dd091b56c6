"""int4 -> int8 into memory that every layer uses again: before warpgroup products.

`triton.scratch.unpacked_times_16` writes the same codes. Here launches are kept: a prompt has
hundreds of weights, and its time may be the host's.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from duotone.tools.devices import stream_handle
from duotone.tools.nvrtc import Launch, PreparedLaunch, Sources
from duotone.weights.kernels.scratch import scratch
from duotone.weights.modules.packed_weight import PackedWeight

SOURCE = "unpack_int4.cu"
THREADS, SIXTEEN = 256, 16
# Launches that are kept: of all weights of a few models.
_MAX_LAUNCHES = 1 << 14
_sources = Sources("duotone.weights.kernels.cuda")


class Arguments(ctypes.Structure):
    """`Arguments` of unpack_int4.cu."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("sixteens", ctypes.c_longlong),
    )


MACROS = {"THREADS": THREADS, "ARGUMENTS_BYTES": ctypes.sizeof(Arguments)}


def takes(weight: PackedWeight) -> bool:
    """True for codes in whole sixteens of bytes that begin at a multiple of sixteen."""
    return not (weight.codes.data_ptr() % SIXTEEN or weight.codes.numel() % SIXTEEN)


def unpacked_times_16(weight: PackedWeight) -> Tensor:
    """The 4-bit codes times 16 as int8 [out, in], in shared memory: valid under `LAUNCHES`.

    weight: one that it `takes`.
    """
    (rows, columns), device = weight.shape, weight.codes.device
    codes = scratch(device, "unpacked weights", rows * columns, torch.int8)
    addresses = weight.codes.data_ptr(), codes.data_ptr()
    launch = _prepared(*addresses, weight.codes.numel() // SIXTEEN, device)
    launch(stream_handle(torch.cuda.current_device()))
    return codes.view(rows, columns)


@lru_cache(maxsize=_MAX_LAUNCHES)
def _prepared(packed: int, codes: int, sixteens: int, device: torch.device) -> PreparedLaunch:
    """The launch between two addresses."""
    kernel = _sources.kernel(SOURCE, "unpack_int4", tuple(MACROS.items()), device)
    at = Launch(-(-sixteens // THREADS), THREADS, 0)
    return kernel.prepared(at, Arguments(packed, codes, sixteens))
