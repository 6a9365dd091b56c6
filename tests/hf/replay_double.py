"""A CUDA graph's stand-in on CPUs: what torch was asked for at the capture is done again.

Like a graph it runs nothing when it is captured, it repeats operations on the tensors of its
capture and no Python, and later results overwrite earlier ones. So it is stale where a graph is,
and its tensors hold nothing before the first replay.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duotone.cache import blocks
from duotone.hf.graphs import decode_call, decode_steps, kept_steps, rules

_LOCK = threading.Lock()
# What `is_capturing` was, by the captures that run: the first one has the real function.
_INSIDE: list[Callable[..., bool]] = []
# A CUDA graph cannot wait for the device, nor for a copy of what is on the host (lift_fresh).
ASKING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "lift_fresh")
# Byte of tensors that nothing has written.
POISON = 0x3F
RANDOM = ("bernoulli", "multinomial", "rand", "dropout")


class Recorded(TorchDispatchMode):
    """Notes operations and their results, and undoes what they wrote when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable, tuple, dict, list[tuple[Tensor, bool]]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ASKING or name.startswith(RANDOM):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            for x in given:
                self._keep(x)
        result = func(*args, **kwargs)
        storages = {_storage(x) for x in given}
        outs = [(x, _storage(x) not in storages) for x in _tensors(result)]
        self._made |= {_storage(x) for x, is_new in outs if is_new}
        self.operations.append((func, args, kwargs, outs))
        return result

    def _keep(self, x: Tensor) -> None:
        at = _storage(x)
        if at not in self._made and at not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            self._before[at] = (whole, whole.clone())

    def undo(self) -> None:
        """Give tensors from before the capture their contents back, and take new ones theirs."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        for _, _, _, outs in self.operations:
            for x, is_new in outs:
                if is_new:
                    x.untyped_storage().fill_(POISON)

    def replay(self) -> None:
        """Do all operations again; results go into the tensors of the capture."""
        for func, args, kwargs, outs in self.operations:
            for (kept, is_new), x in zip(outs, _tensors(func(*args, **kwargs)), strict=True):
                if is_new:
                    kept.copy_(x)


def _tensors(result: Any) -> list[Tensor]:
    """An operation returns one tensor, several, lists of them, or numbers."""
    if isinstance(result, Tensor):
        return [result]
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class ReplayDouble:
    """Has the attributes of `CudaGraph`; counts captures and replays. device: of its models."""

    captures = replays = 0
    nbytes = 1000
    device = "cpu"

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        self._recorded = Recorded()
        try:
            with capturing(), self._recorded:
                self.result = body()
        finally:
            self._recorded.undo()
        type(self).captures += 1

    def replay(self) -> None:
        type(self).replays += 1
        self._recorded.replay()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ReplayDouble]]:
    """`enable` on a CPU decodes as on a GPU, with the double for its graphs."""
    kind = type("ReplayDouble", (ReplayDouble,), {})
    monkeypatch.setattr(decode_steps, "capture", kind)
    # Models are shared by tests; their captures are not.
    monkeypatch.setattr(kept_steps, "_KEPT", weakref.WeakKeyDictionary())
    monkeypatch.setattr(rules, "graphs_on", lambda device: True)
    return kind


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, tables of blocks know that launches are captured; threads may be inside at once.

    Two patches that overlap in time would undo each other in the wrong order.
    """
    with _LOCK:
        _INSIDE.append(blocks.is_capturing)
        blocks.is_capturing = lambda device: True
    try:
        yield
    finally:
        with _LOCK:
            first = _INSIDE[0]
            _INSIDE.pop()
            if not _INSIDE:
                blocks.is_capturing = first


@contextmanager
def growing() -> Iterator[None]:
    """Caches decode in buffers that grow: the reference for fixed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_call, "is_decode_step", lambda *step: False)
        yield
