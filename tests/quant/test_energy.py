"""Tokens that stand out count more: class order and levels by energy."""

import pytest
import torch

from duotone.quant import TensorSpec, quantize
from duotone.quant.ranges import MAX_GAIN, energy_gain, energy_weights

SPEC = TensorSpec(1, levels="lloyd", energy=1.0, param_dtype="float32")


def sparse(channels: int = 8, tokens: int = 256) -> torch.Tensor:
    """A quiet background, and a tenth of the tokens five times as strong."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, channels)
    x[:, : tokens // 10] *= 5
    return x


def test_weights_are_energies_relative_to_the_largest() -> None:
    x = torch.tensor([[3.0, 0.0, 1.0], [4.0, 0.0, 0.0]])
    assert torch.allclose(energy_weights(x, 1.0), torch.tensor([[1.0, 0.0, 1 / 25]]))
    assert torch.equal(energy_weights(torch.zeros(2, 3), 1.5), torch.zeros(1, 3))


def test_the_gain_is_the_weighted_least_squares_fit() -> None:
    x = sparse()[0].T
    x_hat = x.sign()
    weights = energy_weights(x, 1.0).expand_as(x)
    for channel, gain in enumerate(energy_gain(x, x_hat, 1.0).flatten().tolist()):
        root = weights[channel].sqrt()
        fit = torch.linalg.lstsq((root * x_hat[channel])[:, None], (root * x[channel])[:, None])
        assert gain == pytest.approx(min(fit.solution.item(), MAX_GAIN), rel=1e-4)


def test_levels_move_out_to_the_tokens_that_stand_out() -> None:
    x = sparse()
    plain, weighed = (quantize(x, SPEC.replace(energy=e)).dequantize() for e in (0.0, 1.0))
    loud, quiet = slice(None, 25), slice(25, None)
    assert (weighed - x)[:, loud].square().mean() < 0.8 * (plain - x)[:, loud].square().mean()
    assert (weighed - x)[:, quiet].square().mean() > (plain - x)[:, quiet].square().mean()
    # The mean stays where it was: what most tokens share is exact.
    assert torch.allclose(
        weighed.mean(1) - plain.mean(1),
        torch.zeros(8),
        atol=0.5 * (plain - x).square().mean().sqrt(),
    )


def test_classes_follow_the_energy() -> None:
    """A channel that varies only in loud tokens wins over one that varies a little everywhere."""
    torch.manual_seed(0)
    x = torch.zeros(1, 200, 2)
    x[0, :, 0] = torch.randn(200)
    x[0, :4, 1] = 6 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    spec = SPEC.replace(classes=((1, 1 / 2),))
    by_energy, alike = (quantize(x, spec.replace(energy=e)).classes for e in (1.0, 0.0))
    assert by_energy.flatten().tolist() == [1, 0]
    assert alike.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("power", [0.5, 1.5, 2.0])
def test_large_values_do_not_overflow(power: float) -> None:
    spec = SPEC.replace(energy=power, param_dtype="bfloat16")
    assert torch.isfinite(quantize(1e15 * sparse(), spec).dequantize()).all()


def test_padding_and_constant_groups_change_nothing() -> None:
    x = torch.cat([sparse(), torch.full((1, 9, 8), 1e4)], 1)
    mask = torch.arange(x.shape[1])[None] < 256
    padded, alone = quantize(x, SPEC, mask), quantize(sparse(), SPEC)
    assert torch.equal(padded.dequantize()[:, :256], alone.dequantize())
    constant = torch.full((1, 63, 8), 0.1)
    assert torch.equal(quantize(constant, SPEC).dequantize(), constant)
