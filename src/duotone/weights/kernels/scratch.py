"""Memory that kernels use again and again: partial sums, counters, unpacked weights.

One buffer per device and use, kept for good, because captured graphs hold its address. Calls on
one stream follow each other and may share it; calls on two streams at once must not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from duotone.kept import kept

_buffers: dict[tuple[torch.device, str], list[Tensor]] = {}


def scratch(device: torch.device, use: str, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements for `use`; zeros when new, later the contents that the last call left.

    Errors: RuntimeError if it had to grow while a CUDA graph is captured.
    """
    buffers = _buffers.setdefault((device, use), [])
    if not buffers or buffers[-1].numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"memory for {use} ({count} x {dtype}) must exist before a CUDA graph is captured; "
                "run the same call once before the capture"
            )
        # Older buffers stay: graphs may hold them. Doubling bounds their sum.
        old = buffers[-1].numel() if buffers else 0
        made = partial(torch.zeros, max(count, 2 * old), dtype=dtype, device=device)
        buffers.append(kept(made, device))
    return buffers[-1][:count]
