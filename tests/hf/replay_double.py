"""A CUDA graph's stand-in on CPUs: a replay runs the captured body again, on the same tensors.

Like a graph it runs nothing when it is captured, and later results overwrite earlier ones.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from duotone.hf import decode_steps, graph_decode, graph_rules


class ReplayDouble:
    """Has the attributes of `CudaGraph`; counts captures and replays."""

    captures = replays = 0
    nbytes = 1000

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        type(self).captures += 1
        # A graph does not keep its body alive.
        self._body, self._kept, self.result = weakref.WeakMethod(body), {}, None

    def replay(self) -> None:
        type(self).replays += 1
        result = self._body()()
        if result is None:
            return
        kind, fields = result
        for name, x in fields.items():
            if isinstance(x, torch.Tensor) and name in self._kept:
                self._kept[name].copy_(x)
            else:
                self._kept[name] = x
        self.result = (kind, self._kept)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ReplayDouble]]:
    """`enable` on a CPU decodes as on a GPU, with the double for its graphs."""
    kind = type("ReplayDouble", (ReplayDouble,), {})
    monkeypatch.setattr(decode_steps, "capture", kind)
    monkeypatch.setattr(graph_rules, "graphs_on", lambda device: True)
    return kind


@contextmanager
def growing() -> Iterator[None]:
    """Caches decode in buffers that grow: the reference for fixed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_decode, "is_decode_step", lambda *step: False)
        yield
