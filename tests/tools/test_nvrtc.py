"""The launcher of CUDA sources: what it says before a device is asked for anything."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from duotone.tools.nvrtc import Kernel, Launch, Sources


def test_a_new_kernel_within_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sources = Sources("duotone.weights.kernels.cuda")
    with pytest.raises(RuntimeError, match="wgmma_gemm must be compiled and loaded"):
        sources.kernel("wgmma_gemm.cu", "wgmma_gemm", (), torch.device("cuda", 0))


@pytest.mark.parametrize("package", ["attention.cuda", "weights.kernels.cuda"])
def test_headers_are_put_in_place(package: str) -> None:
    name = {"attention.cuda": "spans/decode.cu", "weights.kernels.cuda": "wgmma_gemm.cu"}[package]
    text = Sources(f"duotone.{package}").text(name)
    assert '#include "' not in text
    assert "__global__" in text


def test_no_thread_lowers_the_shared_memory_that_another_allows(monkeypatch) -> None:
    pytest.importorskip("cuda.bindings")
    limits, begun, larger = [], threading.Event(), threading.Event()

    def call(kernel: Kernel, name: str, *arguments: object) -> None:
        """The driver: it takes long to set the smaller limit."""
        if name != "cuFuncSetAttribute":
            return
        if arguments[-1] == 60:
            begun.set()
            larger.wait(0.05)
        limits.append(arguments[-1])
        if arguments[-1] == 100:
            larger.set()

    monkeypatch.setattr(Kernel, "_call", call)
    kernel = Kernel(b"", "name", overlaps=False)
    with ThreadPoolExecutor(1) as other:
        other.submit(kernel._settings, Launch(1, 32, shared_bytes=60))
        begun.wait(10)
        kernel._settings(Launch(1, 32, shared_bytes=100))
    assert limits == [60, 100]
    kernel._settings(Launch(1, 32, shared_bytes=100))
    assert limits == [60, 100]
