"""The launcher of CUDA sources: what it says before a device is asked for anything."""

import pytest
import torch

from duotone.nvrtc import Sources


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
