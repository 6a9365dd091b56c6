"""Tokens into and within windows on a real GPU, bit for bit as torch has it."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS

from duotone.attention.cuda.dense.window_append import appends, window_append, window_move
from duotone.cache.static import move_tokens

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_token_enters_its_slot(head_dim: int, dtype) -> None:
    windows = [torch.randn(5, 3, 40, head_dim, device="cuda").to(dtype) for _ in range(2)]
    # As a model hands them over: heads after tokens. All magnitudes.
    new = torch.randn(2, 5, 1, 3, head_dim, device="cuda")
    new *= torch.exp2(torch.randint(-12, 11, (head_dim,), device="cuda").float())
    new[..., 3], new[..., 5] = torch.inf, -0.0
    new = [x.to(dtype).transpose(1, 2) for x in new]
    at = torch.tensor([0, 39, 7, 7, 20], device="cuda")
    expected = [window.clone() for window in windows]
    for window, states in zip(expected, new, strict=True):
        window[torch.arange(5), :, at] = states[:, :, 0]
    assert appends(tuple(new), tuple(windows))
    window_append(tuple(new), tuple(windows), at)
    for window, states in zip(windows, expected, strict=True):
        assert torch.equal(window, states)
    assert not appends(tuple(x[..., 1:] for x in new), tuple(windows))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
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
        assert torch.equal(window, states)
