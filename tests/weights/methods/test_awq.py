import pytest
import torch

from duotone.weights.methods.awq import scaling_factors, search
from duotone.weights.methods.rtn import round_to_nearest, weight_scale


def inputs(tokens=100, channels=63, seed=0):
    """x [tokens, channels] in which channel 5 is forty times the others."""
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 40
    return x


def weights(channels=63, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, channels, generator=generator) for rows in (7, 11)]


def output_error(x, weight, codes, scale, factors):
    """|| Q(W diag(s)) diag(s)^-1 X - W X ||^2, from the inputs themselves."""
    columns = codes.shape[1]
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(16, 1)[:, :columns]
    restored = (codes * wide)[:, : weight.shape[1]] / factors
    return float(((restored - weight).double() @ x.double().T).square().sum())


def test_factors_are_centred_and_none_at_alpha_zero():
    average = torch.tensor([1.0, 4.0, 16.0])
    assert torch.equal(scaling_factors(average, 0.0), torch.ones(3))
    torch.testing.assert_close(scaling_factors(average, 0.5), torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("group", [None, 16])
def test_the_best_alpha_is_that_of_the_outputs(group):
    x, both = inputs(), weights()
    average = x.abs().mean(0)
    found = search(both, x.T @ x, average, 4, group)
    errors = []
    for step in range(20):
        factors = scaling_factors(average, step / 20)
        wide = [torch.nn.functional.pad(w * factors, (0, 1)) for w in both]
        parts = zip(both, (round_to_nearest(w, 4, group) for w in wide), strict=True)
        errors.append(sum(output_error(x, w, *codes, factors) for w, codes in parts))
    best = min(errors)
    assert found.alpha == errors.index(best) / 20 > 0
    assert found.error == pytest.approx(best, rel=1e-3)
    assert found.error_rtn == pytest.approx(errors[0], rel=1e-3)
    assert found.error < 0.5 * found.error_rtn
    torch.testing.assert_close(found.factors, scaling_factors(average, found.alpha))


def test_channels_without_input_do_no_harm():
    x = inputs()
    x[:, 3] = 0
    found = search(weights(), x.T @ x, x.abs().mean(0), 4)
    assert found.factors.isfinite().all()
    assert found.error <= found.error_rtn


@pytest.mark.parametrize(
    ("moments", "message"),
    [(torch.eye(5), "needs second moments"), (torch.eye(63) / 0, "must be finite")],
)
def test_moments_that_do_not_fit_are_refused(moments, message):
    with pytest.raises(ValueError, match=message):
        search(weights(), moments, torch.ones(63), 4)


@pytest.mark.parametrize("group", [None, 16])
def test_the_clip_of_least_output_error_is_each_channels_own(group):
    x, weight = inputs(channels=64), weights(64)[0]
    size = group or 64
    scales = {
        "full": weight_scale(weight, 4, group),
        "weight": weight_scale(weight, 4, group, True),
        "output": weight_scale(weight, 4, group, True, x.T @ x),
    }
    errors = {}
    for name, scale in scales.items():
        part = scale.reshape(7, -1, 1)
        grouped = weight.unflatten(1, (-1, size))
        wrong = (grouped / part).round().clamp(-8, 7) * part - grouped
        out = torch.einsum("ogi,tgi->ogt", wrong, x.unflatten(1, (-1, size)))
        errors[name] = out.square().sum(-1)
    assert (errors["output"] <= errors["full"] * 1.0001).all()
    assert errors["output"].sum() < 0.95 * errors["weight"].sum()
