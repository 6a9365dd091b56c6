"""Checks of values: made at once, not at all, or together at the end of a step."""

import pytest
import torch

from duotone.quant.checks import Checks, holds, put_off, unchecked

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def test_a_check_is_made_where_it_is_asked_for() -> None:
    assert holds(GOOD, "")
    assert not holds(BAD, "")


def test_nobody_checks_inside_unchecked() -> None:
    with unchecked():
        assert holds(BAD, "")


def test_checks_that_are_put_off_are_made_together() -> None:
    checks = Checks()
    with put_off(checks):
        assert holds(GOOD, "first")
        assert holds(BAD, "second")
        assert holds(BAD, "third")
    assert not holds(BAD, "not put off")
    with pytest.raises(ValueError, match="second"):
        checks.settle()
    checks.settle()  # none is left


def test_good_numbers_pass() -> None:
    checks = Checks()
    with put_off(checks):
        holds(GOOD, "")
    checks.settle()


def test_blocks_within_blocks_put_off_to_their_own() -> None:
    inner, outer = Checks(), Checks()
    with put_off(outer):
        with put_off(inner):
            holds(BAD, "inner")
        holds(BAD, "outer")
    for checks, name in ((inner, "inner"), (outer, "outer")):
        with pytest.raises(ValueError, match=name):
            checks.settle()
