"""Memory that kernels use again and again: partial sums, counters, unpacked weights.

One buffer per device and use, kept for good, because captured graphs hold its address. Calls on
one stream follow each other and may share it; calls on two streams at once must not. What one
launch writes and another one reads is shared under `LAUNCHES`.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor

from duotone.tools.kept import is_capturing, kept

# Held from a launch that fills a buffer to the last one that reads it: a thread that launches in
# the same stream between them would fill it with its own.
LAUNCHES = threading.Lock()
_buffers: dict[tuple[torch.device, str], list[Tensor]] = {}


def scratch(device: torch.device, use: str, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements for `use`; zeros when new, later the contents that the last call left.

    Errors: RuntimeError if it had to grow while a CUDA graph is captured.
    """
    buffers = _buffers.setdefault((device, use), [])
    found = buffers[-1] if buffers else None  # another thread may add one at any time
    if found is None or found.numel() < count:
        if is_capturing(device):
            raise RuntimeError(
                f"memory for {use} ({count} x {dtype}) must exist before a CUDA graph is captured; "
                "run the same call once before the capture"
            )
        # Older buffers stay: graphs may hold them. Doubling bounds their sum.
        old = 0 if found is None else found.numel()
        made = partial(torch.zeros, max(count, 2 * old), dtype=dtype, device=device)
        found = kept(made, device)
        buffers.append(found)
    return found[:count]
