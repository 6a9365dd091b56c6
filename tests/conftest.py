"""Poisoned allocations for every test: an element that nobody writes shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

# Shared two-core machines stall now and then; a deadline would only measure that.
settings.register_profile(
    "duotone", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("duotone")

# Test processes run side by side; more threads than cores only slows all of them down.
torch.set_num_threads(1)

POISON_BYTE = 0xAA


def _poison(x: Tensor) -> Tensor:
    if x.is_floating_point():
        return x.fill_(float("nan"))
    if x.dtype == torch.bool or x.is_complex():
        return x
    return x.fill_(POISON_BYTE if x.dtype == torch.uint8 else -86)


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        return x if x.device.type == "meta" else _poison(x)

    return wrapped


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and friends return NaN, or 0xAA in packed buffers."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty",):
        monkeypatch.setattr(Tensor, name, _poisoned(getattr(Tensor, name)))
