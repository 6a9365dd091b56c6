import pytest
import torch
from torch import nn

from exactly import assert_same, exact_norms, no_rounding, rounding_as, scramble


def test_a_small_difference_is_seen():
    x = torch.randn(7).double()
    assert_same(x, x)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(x * (1 + 1e-8), x)


def test_float64_stays_inside_and_not_outside():
    x = torch.zeros(1, dtype=torch.float64)
    with no_rounding():
        assert x.float().dtype == torch.float64
        assert x.to(dtype=torch.float32).dtype == torch.float64
        assert x.long().float().dtype == torch.float64
        assert x.half().float().dtype == torch.float32
        assert x.to(torch.float16).dtype == torch.float16
    assert x.float().dtype == torch.float32
    with rounding_as(torch.float32):
        assert x.float().dtype == torch.float32
    with rounding_as(torch.float64):
        assert x.float().dtype == torch.float64


def test_norms_are_replaced_and_scrambled():
    class OddRMSNorm(nn.RMSNorm):
        pass

    model = nn.Sequential(OddRMSNorm(5, eps=1e-6), nn.Linear(5, 3)).double()
    scramble(model)
    x = torch.randn(2, 5).double()
    before = model(x)
    assert type(exact_norms(model)[0]).__module__ == "duotone.weights.equivalences.norms"
    assert_same(model(x), before)
    assert (model[0].weight - 1).abs().min() > 0
    assert model[1].bias.abs().min() > 0
