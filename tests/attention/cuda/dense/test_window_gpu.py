"""Tokens into and within windows of 16 bits and fp8 on a real GPU, bit for bit as torch has it."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS

from duotone.attention.cuda.dense.window_append import appends, window_append, window_move
from duotone.cache.dense_dtype import FP8, as_bytes, kept_as
from duotone.cache.static import move_tokens

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("kept", [None, FP8], ids=["alike", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_token_enters_its_slot(head_dim: int, dtype, kept) -> None:
    kept = kept or dtype
    windows = [torch.randn(5, 3, 40, head_dim, device="cuda").to(kept) for _ in range(2)]
    # As a model hands them over: heads behind tokens. All magnitudes, some beyond 448.
    new = torch.randn(2, 5, 1, 3, head_dim, device="cuda")
    new *= torch.exp2(torch.randint(-12, 11, (head_dim,), device="cuda").float())
    new[..., 3], new[..., 5] = torch.inf, -0.0
    new = [x.to(dtype).transpose(1, 2) for x in new]
    at = torch.tensor([0, 39, 7, 7, 20], device="cuda")
    expected = [as_bytes(window).clone() for window in windows]
    for window, states in zip(expected, new, strict=True):
        window[torch.arange(5), :, at] = as_bytes(kept_as(states[:, :, 0], kept))
    assert appends(tuple(new), tuple(windows))
    window_append(tuple(new), tuple(windows), at)
    for window, states in zip(windows, expected, strict=True):
        assert torch.equal(as_bytes(window), states)
    assert not appends(tuple(x[..., 1:] for x in new), tuple(windows))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_number_enters_fp8_windows_as_torch_has_it(dtype) -> None:
    bits = torch.arange(1 << 16, device="cuda")
    x = (bits << 16).int().view(FP32) if dtype == FP32 else bits.short().view(dtype)
    new = x.view(64, 8, 1, 128)
    windows = [torch.zeros(64, 8, 2, 128, device="cuda").to(FP8) for _ in range(2)]
    window_append((new, new), tuple(windows), torch.ones(64, dtype=torch.long, device="cuda"))
    expected = kept_as(new, FP8)
    real = ~expected.float().isnan()
    for window in windows:
        assert not as_bytes(window)[:, :, 0].any()
        got = window[:, :, 1:]
        assert torch.equal(got.float().isnan(), ~real)
        assert torch.equal(as_bytes(got)[real], as_bytes(expected)[real])


@pytest.mark.parametrize("dtype", [BF16, FP32, FP8], ids=str)
def test_tokens_change_slots_where_a_stage_is_full(dtype) -> None:
    windows = [torch.randn(3, 2, 40, 80, device="cuda").to(dtype) for _ in range(2)]
    source = torch.arange(20, 30, device="cuda").expand(3, -1) + torch.tensor(
        [[0], [3], [10]], device="cuda"
    )
    target = torch.arange(10, device="cuda").flip(0).expand(3, -1)
    full = torch.tensor([True, False, True], device="cuda")
    expected = [window.clone() for window in windows]
    for window in expected:
        move_tokens(window, source, target, full)
    assert appends(tuple(windows), tuple(windows))
    window_move(tuple(windows), source, target, full)
    for window, states in zip(windows, expected, strict=True):
        assert torch.equal(as_bytes(window), as_bytes(states))
