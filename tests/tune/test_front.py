import pytest

from duotone.tune.front import best_within, pareto_front, thinned

POINTS = [(2.0, 0.5), (1.0, 1.0), (1.0, 0.9), (3.0, 0.5), (4.0, 0.1), (2.0, 0.5), (1.5, 2.0)]


def test_the_front_of_hand_made_points():
    assert pareto_front(POINTS) == [2, 0, 4]
    assert pareto_front([]) == []
    assert pareto_front([(1.0, 1.0)]) == [0]


@pytest.mark.parametrize(("bits", "best"), [(0.5, None), (1.0, 2), (1.9, 2), (3.5, 0), (9, 4)])
def test_the_best_within_a_budget(bits, best):
    assert best_within(POINTS, bits) == best


def test_thinning_keeps_the_ends():
    points = [(2.0**k, 1.0 / (k + 1)) for k in range(9)]
    front = pareto_front(points)
    assert thinned(front, points, 3) == [0, 4, 8]
    assert thinned(front, points, 20) == front
