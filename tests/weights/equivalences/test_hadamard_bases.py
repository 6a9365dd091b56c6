import pytest
import torch

from duotone.weights.equivalences.hadamard_bases import base_matrix, has_base, sylvester

ORDERS = (1, 2, 4, 8, 12, 20, 28, 36, 40, 44, 52, 60, 76, 92, 100, 108, 116, 140, 148, 156, 172)


def assert_hadamard(h):
    m = len(h)
    product = h.long() @ h.long().T
    assert torch.equal(product, m * torch.eye(m, dtype=torch.long))
    assert bool((h.abs() == 1).all())


@pytest.mark.parametrize("m", ORDERS)
def test_rows_are_orthogonal_and_the_first_is_all_ones(m):
    h = base_matrix(m)
    assert h.dtype == torch.int8
    assert_hadamard(h)
    assert bool((h[0] == 1).all())


def test_every_order_that_is_claimed_is_one():
    claimed = [m for m in range(1, 257) if has_base(m)]
    for m in claimed:
        assert_hadamard(base_matrix(m))
    assert [m for m in range(4, 257, 4) if m not in claimed] == [188, 232 + 4]


def test_the_check_sees_a_flipped_sign():
    h = base_matrix(28).clone()
    h[3, 5] *= -1
    with pytest.raises(AssertionError):
        assert_hadamard(h)


@pytest.mark.parametrize("m", [0, 3, 6, 188])
def test_unknown_orders_are_refused(m):
    with pytest.raises(ValueError, match=f"order {m}"):
        base_matrix(m)


def test_powers_of_two_are_scipys():
    scipy = pytest.importorskip("scipy.linalg")
    assert torch.equal(sylvester(16), torch.from_numpy(scipy.hadamard(16)))
    with pytest.raises(ValueError, match="power of two"):
        sylvester(12)
