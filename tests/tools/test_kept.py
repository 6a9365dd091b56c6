"""Tensors that are kept for good are allocated by another thread than the one that asks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from duotone.tools.kept import cached_once, in_another_thread, kept


class Pool(TorchDispatchMode):
    """Stands for a compiler's pool: it sees what its own thread allocates."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device that is not there. waited: threads that waited for their stream."""
    state = SimpleNamespace(capturing=False, waited=[])
    stream = SimpleNamespace(synchronize=lambda: state.waited.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return state


DEVICE = torch.device("cuda", 0)


def test_a_pool_of_this_thread_does_not_see_it(cuda: SimpleNamespace) -> None:
    with Pool() as pool:
        made = kept(lambda: torch.zeros(3), DEVICE)
    assert (made.tolist(), pool.seen) == ([0, 0, 0], 0)
    assert cuda.waited
    assert threading.get_ident() not in cuda.waited


def test_what_this_thread_allocates_shows() -> None:
    with Pool() as pool:
        torch.zeros(3)
    assert pool.seen == 1


def test_a_capture_and_a_cpu_have_it_in_place(cuda: SimpleNamespace) -> None:
    assert kept(threading.get_ident, torch.device("cpu")) == threading.get_ident()
    assert kept(threading.get_ident, DEVICE) != threading.get_ident()
    cuda.capturing = True
    assert kept(threading.get_ident, DEVICE) == threading.get_ident()


@pytest.mark.parametrize(("device", "capturing"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_inference_mode_does_not_reach_it(
    cuda: SimpleNamespace, device: str, capturing: bool
) -> None:
    cuda.capturing = capturing
    with torch.inference_mode():
        assert not kept(lambda: torch.zeros(1), torch.device(device, 0)).is_inference()


def test_errors_come_back() -> None:
    with pytest.raises(KeyError, match="no"):
        in_another_thread(lambda: {}["no"])


def test_threads_that_ask_at_once_get_one_tensor() -> None:
    both = threading.Barrier(2, timeout=10)

    @cached_once
    def made(size: int) -> torch.Tensor:
        if size == 3:
            both.wait()
        return torch.zeros(size)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(made, (3, 3))
    assert first is second is made(3)
    assert made(4) is made(4) is not first
    made.cache_clear()
    assert made(4) is not first
