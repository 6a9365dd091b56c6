"""XQuant's weighted average of codes: Table 5's intervals, ties, and laws."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import average_codes


def average(codes: list[int], weights: list[float]) -> int:
    rows = [torch.tensor([code], dtype=torch.uint8) for code in codes]
    return int(average_codes(rows, weights))


# Table 5: gamma_0, and by hand the average of (1, 0), (2, 0), (3, 0) and of (1, 3) at 2 bits.
INTERVALS = {
    "[0,1/6)": ((0, 0.01, 0.166), (0, 0, 0, 3)),
    "(1/6,1/4)": ((0.167, 0.2, 0.249), (0, 0, 1, 3)),
    "(1/4,1/2)": ((0.251, 0.4, 0.499), (0, 1, 1, 2)),
    "(1/2,3/4)": ((0.501, 0.6, 0.749), (1, 1, 2, 2)),
    "(3/4,5/6)": ((0.751, 0.8, 0.833), (1, 2, 2, 1)),
    "(5/6,1]": ((0.834, 0.99, 1), (1, 2, 3, 1)),
}


@pytest.mark.parametrize(("gammas", "expected"), INTERVALS.values(), ids=INTERVALS)
def test_the_six_intervals_of_table_5(gammas, expected) -> None:
    for gamma in gammas:
        pairs = ((1, 0), (2, 0), (3, 0), (1, 3))
        assert tuple(average([*pair], [gamma, 1 - gamma]) for pair in pairs) == expected


@pytest.mark.parametrize("gamma", [1 / 6, 1 / 4, 1 / 2, 3 / 4, 5 / 6])
def test_ties_on_the_borders_go_up(gamma: float) -> None:
    exact = Fraction(gamma).limit_denominator(12)
    for a in range(4):
        for b in range(4):
            want = floor(exact * a + (1 - exact) * b + Fraction(1, 2))
            assert average([a, b], [gamma, 1 - gamma]) == want


RUNS = st.integers(2, 5).flatmap(
    lambda layers: st.tuples(
        st.lists(st.integers(0, 255), min_size=layers, max_size=layers),
        st.lists(st.integers(0, 6), min_size=layers, max_size=layers).filter(any),
    )
)


@given(RUNS, st.randoms())
def test_the_average_is_the_nearest_code_in_any_order(run, random) -> None:
    codes, parts = run
    exact = Fraction(sum(c * p for c, p in zip(codes, parts, strict=True)), sum(parts))
    pairs = [(code, part / sum(parts)) for code, part in zip(codes, parts, strict=True)]
    random.shuffle(pairs)
    got = average(*map(list, zip(*pairs, strict=True)))
    assert got == floor(exact + Fraction(1, 2))
    assert min(codes) <= got <= max(codes)
