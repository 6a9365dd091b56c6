"""Helpers of GPU tests of the CUDA kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from duotone.attention.cuda.shared.runtime import MIN_CAPABILITY

NO_KERNELS = not torch.cuda.is_available() or torch.cuda.get_device_capability() < MIN_CAPABILITY
NEEDS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_KERNELS, reason=f"needs a CUDA device of capability {MIN_CAPABILITY}"),
]


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where code inside the block waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
