"""Codes of rows by kernels in the interpreter against the reference."""

import pytest
import torch

from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.quantize_rows import norm_quantize, quantize

from linear_cases import DEVICE

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_kernels)])
def test_half_goes_to_even_and_ends_are_clamped(impl: str) -> None:
    x = torch.tensor([[0.5, 1.5, -2.5, 200.0, -200.0, 1e30, -3e38, 0.0]], device=DEVICE)
    codes = quantize(x, torch.ones(1, device=DEVICE), impl=impl).codes
    assert codes.tolist() == [[0, 2, -2, 127, -127, 127, -127, 0]]


def near(codes: torch.Tensor, wanted: torch.Tensor) -> None:
    away = (codes.int() - wanted.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 5e-3


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("columns", [100, 9000])
def test_gates(columns: int, dynamic: bool) -> None:
    gate, up = torch.randn(3, 2 * columns, device=DEVICE).chunk(2, 1)
    scale = None if dynamic else torch.tensor([0.03, 0.01, 0.02], device=DEVICE)
    given = {"activation": "silu", "up": up}
    found = quantize(gate, scale, impl="triton", **given)
    wanted = quantize(gate, scale, impl="reference", **given)
    torch.testing.assert_close(found.scale, wanted.scale)
    near(found.codes, wanted.codes)
    other = quantize(gate * 1.5, scale, impl="reference", **given)
    with pytest.raises(AssertionError):
        near(found.codes, other.codes.roll(1, 1))


def test_clear_refusals() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="contiguous rows"):
        quantize(x.T, torch.ones(1))
    with pytest.raises(ValueError, match="scale must be"):
        quantize(x, torch.ones(3))
    with pytest.raises(ValueError, match="activation"):
        quantize(x, None, activation="tanh")
    with pytest.raises(ValueError, match="kind"):
        norm_quantize(x, None, eps=1e-6, kind="batch")
