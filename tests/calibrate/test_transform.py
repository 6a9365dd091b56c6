"""Bases and widths by their laws: exact inverses, errors in the metric, budgets kept."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.calibrate import transform
from duotone.calibrate.transform import (
    GAUSSIAN,
    WIDTHS,
    allocate,
    expected_error,
    klt,
    level_of,
    outliers,
    unit_sizes,
)
from duotone.quant import TensorSpec
from duotone.quant.classes import class_counts


def moments(*shape, tokens):
    """X^T X / tokens of `tokens` random rows."""
    x = torch.randn(*shape[:-1], tokens, shape[-1], dtype=torch.float64).mul_(3)
    return x.transpose(-1, -2) @ x / tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", [1, 3, 200], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("regularization", [0.0, 0.01])
def test_bases_have_inverses_whatever_the_ranks(tokens, regularization):
    covariance, metric = moments(2, 3, 16, tokens=tokens), moments(2, 3, 16, tokens=tokens)
    spectrum, basis = klt(covariance, metric, regularization)
    eye = torch.eye(16, dtype=torch.float64).expand_as(basis)
    torch.testing.assert_close(basis @ torch.linalg.inv(basis), eye, atol=1e-8, rtol=0)
    assert (spectrum >= 0).all()
    assert (spectrum.diff(dim=-1) <= 0).all()


def test_errors_of_coefficients_are_errors_in_the_metric():
    metric = moments(16, tokens=100)
    _, basis = klt(moments(16, tokens=100), metric, 0.0)
    error = torch.randn(50, 16, dtype=torch.float64)
    cost = torch.einsum("nd,de,ne->n", error, metric, error)
    torch.testing.assert_close((error @ basis).square().sum(-1), cost)


def test_much_regularization_makes_bases_orthogonal():
    metric = moments(2, 16, tokens=100)
    _, basis = klt(moments(2, 16, tokens=100), metric, 1e9)
    level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    torch.testing.assert_close(
        basis.transpose(-1, -2) @ basis, level * torch.eye(16, dtype=torch.float64)
    )


@pytest.mark.parametrize("regularization", [0.0, 0.5, 100.0])
def test_units_undo_what_channels_grew_by(regularization):
    """Channels times 8 whose readers are divided by 8: costs and widths are as before."""
    covariance, metric = moments(2, 16, tokens=100), moments(2, 16, tokens=100)
    grown = torch.ones(16, dtype=torch.float64)
    grown[[3, 11]] = 8
    costs = []
    for by in (torch.ones_like(grown), grown):
        larger, smaller = covariance * by * by[:, None], metric / by / by[:, None]
        level = level_of(smaller, 1 / by)
        spectrum, _ = klt(larger, smaller / level[:, None, None], regularization, 1 / by)
        costs.append(spectrum * level[:, None])
    torch.testing.assert_close(*costs)


def test_outliers_are_channels_far_from_the_median():
    sizes = torch.tensor([[1.0, 1.0, 1.2, 0.9, 3.9, 0.26, 4.4, 0.1], [0.0] * 8])
    expected = torch.tensor([[1.0] * 6 + [4.4, 0.1], [1 / 256] * 8])
    torch.testing.assert_close(outliers(sizes), expected)


def test_coefficients_are_uncorrelated_with_the_spectrum_as_variances():
    covariance = moments(2, 16, tokens=100)
    spectrum, basis = klt(covariance, moments(2, 16, tokens=100), 0.05)
    turned = basis.transpose(-1, -2) @ covariance @ basis
    torch.testing.assert_close(turned, torch.diag_embed(spectrum))


def test_a_metric_of_zeros_counts_as_the_identity():
    covariance = moments(16, tokens=40)
    spectrum, _ = klt(covariance, torch.zeros(16, 16), 0.0)
    torch.testing.assert_close(spectrum, torch.linalg.eigvalsh(covariance).flip(-1))


def test_no_statistics_at_all_still_give_finite_bases():
    spectrum, basis = klt(torch.zeros(8, 8), torch.zeros(8, 8), 0.0)
    assert torch.isfinite(basis).all()
    assert (spectrum == 0).all()


@st.composite
def spectra(draw):
    channels = draw(st.sampled_from([8, 16, 20, 64]))
    layers, seed = draw(st.integers(1, 3)), draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(layers * 2, channels, generator=generator, dtype=torch.float64)
    rows = (rows * draw(st.sampled_from([1.0, 8.0]))).exp().sort(-1, descending=True).values
    names = [(layer, which, "visual") for layer in range(layers) for which in ("key", "value")]
    return dict(zip(names, rows, strict=True))


def spent(allocation):
    return sum(bits * share for classes in allocation.values() for bits, share in classes)


def kept(given, allocation):
    return sum(expected_error(given[name], classes) for name, classes in allocation.items())


@given(spectra(), st.floats(0.25, 4))
def test_allocation_keeps_its_budget_in_whole_channels(given, bits):
    channels = len(given[0, "key", "visual"])
    bits = max(bits, unit_sizes(channels)[0] / channels)
    allocation = allocate(given, bits)
    assert list(allocation) == list(given)
    assert spent(allocation) <= bits * len(given) + 1e-9
    for classes in allocation.values():
        assert classes
        assert {b for b, _ in classes} <= set(WIDTHS)
        assert sum(n for _, n in class_counts(TensorSpec(classes=classes), channels)) == channels


@given(spectra(), st.floats(0.5, 3.9), st.floats(0, 1))
def test_more_bits_never_mean_more_error(given, bits, more):
    fewer, more = allocate(given, bits), allocate(given, min(4.0, bits + more))
    assert kept(given, more) <= kept(given, fewer) * (1 + 1e-12)


@given(spectra(), st.floats(0.5, 2))
def test_the_units_of_largest_variance_get_the_widest_codes(given, bits):
    channels = len(given[0, "key", "visual"])
    size = unit_sizes(channels)[0]
    top = {name: float(spectrum[:size].mean()) for name, spectrum in given.items()}
    widest = {name: classes[0][0] for name, classes in allocate(given, bits).items()}
    order = sorted(top, key=top.get, reverse=True)
    assert [widest[name] for name in order] == sorted(widest.values(), reverse=True)


def test_all_bits_that_pay_are_spent():
    given = {
        (0, "key", "visual"): torch.linspace(9, 1, 64),
        (0, "value", "visual"): torch.linspace(2, 1, 64),
    }
    assert spent(allocate(given, 1.0)) == pytest.approx(2.0)


def test_it_is_reverse_water_filling():
    """Against every way to give 4 units of one tensor widths at that cost."""
    spectrum = torch.tensor([20.0, 6.0, 2.0, 1.0]).repeat_interleave(4)
    best = min(
        sum(float(e) * 4 * GAUSSIAN[w] for e, w in zip((20, 6, 2, 1), widths, strict=True))
        for widths in product((0, 1, 2, 4), repeat=4)
        if sum(widths) <= 5
    )
    classes = allocate({(0, "key", "visual"): spectrum}, 5 / 4)[0, "key", "visual"]
    assert expected_error(spectrum, classes) == pytest.approx(best)


def test_a_jump_is_taken_where_its_first_half_does_not_pay(monkeypatch):
    monkeypatch.setattr(transform, "GAUSSIAN", {0: 1.0, 1: 0.99, 2: 0.1})
    monkeypatch.setattr(transform, "WIDTHS", (0, 1, 2))
    given = {(0, "key", "visual"): torch.tensor([9.0, 4.0]).repeat_interleave(4)}
    assert allocate(given, 1.75)[0, "key", "visual"] == ((2, 0.5), (1, 0.5))
    assert allocate(given, 2.0)[0, "key", "visual"] == ((2, 1.0),)


def test_bits_go_to_the_layer_and_the_tensor_where_errors_cost_most():
    flat = torch.ones(16)
    given = {
        (0, "key", "visual"): flat,
        (0, "value", "visual"): flat,
        (1, "key", "visual"): 50 * flat,
        (1, "value", "visual"): flat,
    }
    bits = {n: sum(b * s for b, s in c) for n, c in allocate(given, 1.0).items()}
    assert max(bits, key=bits.get) == (1, "key", "visual")
    heavier = allocate(
        given, 1.0, weights=dict.fromkeys([n for n in given if n[1] == "value"], 1000.0)
    )
    bits = {n: sum(b * s for b, s in c) for n, c in heavier.items()}
    assert bits[1, "key", "visual"] < bits[1, "value", "visual"]


def test_zeros_get_one_unit_and_no_more():
    given = {(0, "key", "visual"): torch.zeros(16), (0, "value", "visual"): torch.ones(16)}
    allocation = allocate(given, 1.0)
    assert allocation[0, "key", "visual"] == ((1, 0.25),)
    assert sum(b * s for b, s in allocation[0, "value", "visual"]) == pytest.approx(1.75)


@pytest.mark.parametrize("bits", [0.0, -1.0, 0.2, 4.5, float("nan")])
def test_budgets_out_of_range_are_refused(bits):
    with pytest.raises(ValueError, match="bits per channel must lie in"):
        allocate({(0, "key", "visual"): torch.ones(16)}, bits)


def test_spectra_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="all of one length"):
        allocate({(0, "key", "visual"): torch.ones(16), (0, "value", "visual"): torch.ones(8)}, 1.0)
    with pytest.raises(ValueError, match="must be given"):
        allocate({}, 1.0)


def test_a_part_of_few_tokens_gets_its_bits_cheaply():
    """A quarter of the tokens, of the same variance, costs a quarter and saves a quarter."""
    front, back = (0, "key", "visual"), (0, "key", "background")
    given, shares = {front: torch.ones(16), back: torch.ones(16)}, {front: 0.25, back: 0.75}

    def bits(allocation):
        return {name: sum(b * s for b, s in classes) for name, classes in allocation.items()}

    weighed = bits(allocate(given, 1.0, weights={front: 8.0}, shares=shares))
    assert 0.25 * weighed[front] + 0.75 * weighed[back] == pytest.approx(1.0, abs=0.05)
    assert weighed[front] > 2 * weighed[back]
    assert bits(allocate(given, 1.0, shares=shares))[back] == pytest.approx(1.0, abs=0.1)
