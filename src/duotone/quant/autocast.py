"""Our arithmetic is as it is written: under `torch.autocast` the codes are those without it.

Autocast would round factors to 16 bit, and refuses what some operations of ours are given, such as
8-bit floats. The doors to stores and attention switch it off; the model around them keeps it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A block in which `torch.autocast` does nothing on devices of this kind."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
