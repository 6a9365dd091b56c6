import pytest
import torch

from duotone.weights.methods.ranges import BINS, Magnitudes


def seen(*parts):
    found = Magnitudes()
    for part in parts:
        found.update(part)
    return found


def normal(count=20000, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_the_largest_magnitude_is_exact_whatever_the_order():
    for parts in ([normal(), torch.tensor([-70.5])], [torch.tensor([-70.5]), normal()]):
        assert seen(*parts).clip("minmax") == 70.5


def test_every_number_is_counted_once_while_the_range_widens():
    found = seen(normal(777), 10 * normal(333), 1000 * normal(111))
    assert found.numbers == 1221
    assert len(found.counts) == BINS


def test_the_percentile_leaves_rare_outliers_out():
    x = torch.cat((normal(), torch.tensor([500.0])))
    assert seen(x).clip("percentile") == pytest.approx(float(x.abs().quantile(0.9999)), abs=0.3)


def test_the_range_of_least_error_is_near_the_true_one():
    x = torch.cat((normal(), torch.tensor([40.0])))

    def error(clip):
        step = clip / 127
        return float(((x / step).round().clamp(-127, 127) * step - x).square().sum())

    best = min(error(float(c)) for c in torch.linspace(1, 40, 400))
    assert error(seen(x).clip("mse")) < 1.1 * best


def test_merging_is_seeing_both():
    a, b = normal(500), 30 * normal(400, 1)
    merged = seen(a)
    merged.merge(seen(b))
    both = seen(a, b)
    assert merged.numbers == both.numbers
    for method in ("minmax", "percentile", "mse"):
        assert merged.clip(method) == pytest.approx(both.clip(method), rel=0.05)


def test_merging_into_nothing_and_nothing_into_something():
    merged = Magnitudes()
    merged.merge(seen(normal()))
    merged.merge(Magnitudes())
    assert merged.clip("minmax") == seen(normal()).clip("minmax")


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_zeros_seen_first_cost_no_resolution(method):
    zeros, x = torch.zeros(5000), normal() / 1000
    after, before = seen(zeros, x), seen(x, zeros)
    assert after.numbers == 25000
    assert after.clip(method) == before.clip(method)


@pytest.mark.parametrize("zeros_first", [True, False], ids=["zeros first", "zeros last"])
def test_zeros_merge(zeros_first):
    zeros, some = seen(torch.zeros(9)), seen(normal() / 1000)
    merged, other = (zeros, some) if zeros_first else (some, zeros)
    merged.merge(other)
    both = seen(normal() / 1000, torch.zeros(9))
    assert merged.numbers == both.numbers
    assert merged.clip("percentile") == pytest.approx(both.clip("percentile"), rel=1e-3)


def test_zeros_give_a_scale_that_divides():
    assert seen(torch.zeros(9)).scale("mse") > 0


@pytest.mark.parametrize(
    ("x", "method", "message"),
    [
        (torch.tensor([float("nan")]), "minmax", "must be finite"),
        (torch.empty(0), "minmax", "got none"),
        (torch.ones(3), "median", "must be one of"),
    ],
)
def test_what_has_no_range_is_refused(x, method, message):
    with pytest.raises(ValueError, match=message):
        seen(x).clip(method)
