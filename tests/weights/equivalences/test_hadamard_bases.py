import pytest
import torch

from duotone.weights.equivalences.hadamard_bases import base_matrix, has_base, sylvester


def assert_hadamard(h):
    m = len(h)
    product = h.long() @ h.long().T
    assert torch.equal(product, m * torch.eye(m, dtype=torch.long))
    assert bool((h.abs() == 1).all())


def test_every_order_that_is_claimed_is_one_and_begins_with_ones():
    claimed = [m for m in range(1, 257) if has_base(m)]
    for m in claimed:
        h = base_matrix(m)
        assert h.dtype == torch.int8
        assert_hadamard(h)
        assert bool((h[0] == 1).all()), m
    assert {1, 2} <= set(claimed)
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
