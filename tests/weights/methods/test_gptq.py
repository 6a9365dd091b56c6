import pytest
import torch

from duotone.weights.methods.gptq import gptq
from duotone.weights.methods.rtn import round_to_nearest


def problem(rows=7, columns=24, tokens=300, seed=0):
    """A weight, and the moments of inputs whose channels depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), x.T @ x


def output_error(w, codes, scale, moments):
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(8, 1)
    wrong = w - codes * wide
    return float(((wrong @ moments) * wrong).sum())


@pytest.mark.parametrize("group", [None, 8])
def test_outputs_are_closer_than_with_plain_rounding(group):
    w, moments = problem()
    found = gptq(w, moments, 4, group)
    plain = round_to_nearest(w, 4, group)
    assert found.error == pytest.approx(output_error(w, found.codes, found.scale, moments), 1e-4)
    assert found.error_rtn == pytest.approx(output_error(w, *plain, moments), 1e-4)
    assert found.error < 0.7 * found.error_rtn


def test_independent_channels_are_rounded_to_nearest():
    w, _ = problem()
    found = gptq(w, torch.eye(24), 4)
    assert torch.equal(found.codes, round_to_nearest(w, 4)[0])


def test_codes_beyond_one_block_of_columns_are_as_good():
    w, moments = problem(5, 300, 900)
    found = gptq(w, moments, 4)
    assert found.error < 0.7 * found.error_rtn


def test_channels_that_are_never_active_keep_their_weight():
    w, moments = problem()
    moments[3], moments[:, 3] = 0, 0
    found = gptq(w, moments, 8)
    assert torch.equal(found.codes[:, 3], round_to_nearest(w, 8)[0][:, 3])


def test_a_hessian_without_factor_gets_more_damping_not_plain_rounding():
    w, moments = problem()
    shifted = moments - 0.2 * moments.diagonal().mean() * torch.eye(24)
    found = gptq(w, shifted, 4)
    assert 0.01 < found.damping <= 10


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m[:5, :5], "needs second moments"),
        (lambda m: m / 0, "must be finite"),
        (lambda m: -m * 100 + torch.eye(24), "no Cholesky factor"),
    ],
)
def test_moments_that_are_none_are_refused(spoil, message):
    w, moments = problem()
    with pytest.raises(ValueError, match=message):
        gptq(w, spoil(moments), 4)
