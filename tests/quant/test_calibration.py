import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import calibration_affine
from duotone.quant.calibration import MIN_SLOPE

NUMBER = st.floats(-50, 50)
TAU = st.tuples(st.floats(0, 5), st.floats(0, 5))


def g(x: torch.Tensor, tau: tuple[float, float]) -> torch.Tensor:
    slope, offset = calibration_affine(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), tau)
    return slope * x + offset


def equation_7(x: torch.Tensor, tau: tuple[float, float]) -> torch.Tensor:
    gamma, delta = x.min(), x.max()
    slope = ((delta - tau[1]) - (gamma - tau[0])) / (delta - gamma)
    return (x - gamma) * slope + gamma - tau[0]


@given(st.integers(0, 999), TAU)
def test_equals_equation_7_while_its_slope_is_positive(seed: int, tau: tuple[float, float]) -> None:
    x = torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5
    if x.max() - x.min() + tau[0] - tau[1] > 0.1:
        assert torch.allclose(g(x, tau), equation_7(x, tau))


@given(st.lists(NUMBER, min_size=2, max_size=20), TAU)
def test_never_reverses_the_order_of_keys(scores: list[float], tau: tuple[float, float]) -> None:
    """The paper's map does once tau2 - tau1 exceeds the range; its code turns 0, 1, 2 round."""
    x = torch.tensor(sorted(scores), dtype=torch.float64)
    assert (g(x, tau).diff() >= -1e-9).all()


def test_the_guard_keeps_the_strongest_key_where_equation_7_puts_it() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    out = g(x, (0.0, 3.0))
    assert (equation_7(x, (0.0, 3.0)).diff() < 0).all()
    assert torch.allclose(out, torch.tensor([-1 - 2 * MIN_SLOPE, -1 - MIN_SLOPE, -1.0]))


def test_equal_scores_move_together() -> None:
    assert torch.allclose(g(torch.full((4,), 5.0), (1.0, 3.0)), torch.full((4,), 2.0))


@pytest.mark.parametrize("width", [0.0, 2e-309, 1e-25])
def test_scores_that_are_as_good_as_equal_move_as_a_whole(width: float) -> None:
    low = torch.tensor(0.0, dtype=torch.float64)
    slope, offset = calibration_affine(low, low + width, (0.0, 3.0))
    assert slope == 1
    assert offset == pytest.approx(-3)
