"""Switch `torch.autocast` off: codes are the same with and without it.

Autocast would round factors to 16 bit. Stores and attention switch autocast off at their entry
points; the model around them keeps it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_NOTHING: AbstractContextManager = nullcontext()
_has_autocast = cache(torch.amp.is_autocast_available)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Context in which `torch.autocast` does nothing on devices of this kind."""
    kind = device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING
