import pytest
import torch
from torch import nn

from duotone.weights.methods.smooth import smooth, smoothing_factors


def branch(bias=True, seed=0):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(6, bias=bias).double()
    linears = [nn.Linear(6, outs).double() for outs in (3, 5)]
    nn.init.normal_(norm.weight)
    return norm, linears


@pytest.mark.parametrize("bias", [True, False])
def test_the_function_stays_and_the_outlier_moves(bias):
    norm, linears = branch(bias)
    x = torch.randn(11, 6).double()
    norm.weight.data[2] = 50
    before = [linear(norm(x)) for linear in linears]
    largest = norm(x).abs().amax(0)
    smooth(norm, linears, largest)
    for linear, old in zip(linears, before, strict=True):
        torch.testing.assert_close(linear(norm(x)), old, rtol=1e-5, atol=1e-6)
    assert norm(x).abs().amax() < largest.amax() / 3


def test_alpha_decides_who_gets_the_difficulty():
    activation, weights = torch.tensor([8.0, 1.0]), [torch.tensor([[2.0, 2.0]])]
    assert smoothing_factors(activation, weights, 1.0).tolist() == [8.0, 1.0]
    assert smoothing_factors(activation, weights, 0.0).tolist() == [0.5, 0.5]


def test_a_folded_norm_is_refused():
    _, linears = branch()
    with pytest.raises(ValueError, match="was the norm folded already"):
        smooth(nn.LayerNorm(6, elementwise_affine=False), linears, torch.ones(6))
