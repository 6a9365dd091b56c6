"""Threads share buffers of kernels: none gets another's numbers, or too few of them."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from duotone.weights import kernels
from duotone.weights.kernels import scratch as scratch_module
from duotone.weights.kernels.scratch import scratch
from duotone.weights.modules import linear


def test_a_shorter_buffer_of_another_thread_is_not_taken(monkeypatch) -> None:
    class Buffers(list):
        """Another thread adds its own after each that is added."""

        def append(self, made: torch.Tensor) -> None:
            super().extend([made, made[:10]])

    cpu = torch.device("cpu")
    monkeypatch.setattr(scratch_module, "_buffers", {(cpu, "test"): Buffers()})
    assert len(scratch(cpu, "test", 1000, torch.int8)) == 1000
    assert len(scratch(cpu, "test", 9, torch.int8)) == 9


def run_integers(x: torch.Tensor, weight: SimpleNamespace) -> torch.Tensor:
    return linear._run_scratch(x, None, weight)


def run_floats(x: torch.Tensor, weight: SimpleNamespace) -> torch.Tensor:
    return linear.linear_float(x, weight, impl="scratch")


@pytest.mark.parametrize("run", [run_integers, run_floats])
def test_no_thread_fills_weights_that_another_has_yet_to_read(run, monkeypatch) -> None:
    shared, first_fills, second_fills = torch.zeros(1, 1), threading.Event(), threading.Event()

    def fill(weight: SimpleNamespace, dtype: torch.dtype | None = None) -> torch.Tensor:
        shared.fill_(weight.value)
        if weight.value == 1:
            first_fills.set()
            second_fills.wait(0.05)
        else:
            second_fills.set()
        return shared

    fake = SimpleNamespace(unpacked_times_16=fill, dequantized=fill)
    monkeypatch.setitem(sys.modules, "duotone.weights.kernels.triton.scratch", fake)
    monkeypatch.setattr(kernels, "configs", None, raising=False)
    monkeypatch.setattr(linear, "_tiled", lambda fill, x, scale, codes, weight: x @ codes.T)
    monkeypatch.setattr(linear, "_float_reason", lambda x, weight: None)
    monkeypatch.setattr(linear.wgmma_gemm, "unsupported", lambda weight: "stands for a weight")
    one, two = (SimpleNamespace(shape=(1, 1), value=value) for value in (1, 2))
    with ThreadPoolExecutor(1) as other:
        begun = other.submit(run, torch.ones(300, 1), one)
        first_fills.wait(10)
        assert (run(torch.ones(300, 1), two) == 2).all()
        assert (begun.result() == 1).all()
