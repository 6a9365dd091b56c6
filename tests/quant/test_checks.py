"""Checks of values: made at once, not at all, or together at the end of a step."""

import pytest
import torch

from duotone.quant.checks import Checks, is_finite, put_off, unchecked

GOOD, BAD = torch.tensor(3.0), torch.tensor(float("inf"))


def test_a_check_is_made_where_it_is_asked_for() -> None:
    assert is_finite(GOOD, "")
    assert not is_finite(BAD, "")


def test_nobody_checks_inside_unchecked() -> None:
    with unchecked():
        assert is_finite(BAD, "")


def test_checks_that_are_put_off_are_made_together() -> None:
    checks = Checks()
    with put_off(checks):
        assert is_finite(GOOD, "first")
        assert is_finite(BAD, "second")
        assert is_finite(BAD, "third")
    assert not is_finite(BAD, "not put off")
    with pytest.raises(ValueError, match="second"):
        checks.settle()
    checks.settle()  # none is left


def test_blocks_within_blocks_put_off_to_their_own() -> None:
    inner, outer = Checks(), Checks()
    with put_off(outer):
        with put_off(inner):
            is_finite(BAD, "inner")
        is_finite(BAD, "outer")
    for checks, name in ((inner, "inner"), (outer, "outer")):
        with pytest.raises(ValueError, match=name):
            checks.settle()
