"""Every test has a tier that it runs in, shape checks, and poison if it asks."""

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from tiers import ONE_OF, SLOW_FAMILIES

# Shared two-core machines stall now and then; a deadline would only measure that.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=15, **COMMON)
settings.register_profile("thorough", max_examples=60, **COMMON)
# Calls of each test whose shapes are checked by default: all of them take longer than the tests.
CHECKED_CALLS = 100

# Test processes run side by side; more threads than cores only slows all of them down. Results may
# depend on their number, tests may not: OMP_NUM_THREADS=2 runs them with two.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

POISON_BYTE = 0xAA
TESTS = Path(__file__).parent


class FirstCalls(type(jaxtyping.config)):
    """jaxtyping's switch, which it asks at every call: on for the first ones of each test."""

    left = CHECKED_CALLS

    @property
    def jaxtyping_disable(self) -> bool:
        self.left -= 1
        return self.left < 0


def outer_functions(jaxtyped: Callable) -> Callable:
    """jaxtyping's decorator without functions in functions, which each call would decorate anew."""

    def of(typechecker: Any) -> Callable:
        decorate = jaxtyped(typechecker=typechecker)
        return lambda x: x if "<locals>" in getattr(x, "__qualname__", "") else decorate(x)

    return of


def pytest_configure(config: pytest.Config) -> None:
    """The default tier is quick; with slow tests all examples run, and all shapes are checked."""
    # Imports leave little garbage: looking for it is a fifth of what collecting tests takes.
    gc.disable()
    is_quick = "not slow" in config.getoption("markexpr")
    settings.load_profile("default" if is_quick else "thorough")
    if is_quick:
        jaxtyping.config.__class__ = FirstCalls
        jaxtyping.jaxtyped = outer_functions(jaxtyping.jaxtyped)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws equal numbers in any order of tests."""
    torch.manual_seed(0)


def _words(item: pytest.Item) -> list[str]:
    """The arguments of a case that are words."""
    case = getattr(item, "callspec", None)
    return [value for value in case.params.values() if isinstance(value, str)] if case else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases as slow that `tiers` leaves out of the default tier.

    On a GPU tests may run what is slow; without one, tests of the mark `gpu` are skipped.
    """
    seen, has_gpu = Counter(), torch.cuda.is_available()
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") is not None
        if needs_gpu and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if has_gpu or needs_gpu:
            # Many try the slow paths; those that must not take one say so.
            slow = "default::duotone.tools.slow_paths.SlowPathWarning"
            item.add_marker(pytest.mark.filterwarnings(slow))
        path = item.path.relative_to(TESTS).with_suffix("").as_posix()
        rule = f"{path}::{getattr(item, 'originalname', item.name)}"
        if not SLOW_FAMILIES.isdisjoint(_words(item)):
            item.add_marker(pytest.mark.slow)
            continue
        if seen[rule] % ONE_OF.get(rule, 1):
            item.add_marker(pytest.mark.slow)
        seen[rule] += 1


def pytest_collection_finish() -> None:
    """Collections of garbage look at what tests make, not at imported libraries."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    jaxtyping.config.left = CHECKED_CALLS


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
    monkeypatch.setattr(Tensor, "new_empty", _poisoned(Tensor.new_empty))
