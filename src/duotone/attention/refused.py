"""Rules that kernels set for the tokens that they read or pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duotone.quant import TensorSpec
from duotone.quant.honours import Honours


class RefusedError(ValueError):
    """A rule that tokens break, and after a semicolon the choice that breaks it."""


def reason_against(check: Callable[..., Any], *given: Any) -> str | None:
    """Reason for which a check refuses what it is given, or None."""
    try:
        check(*given)
    except RefusedError as refused:
        return str(refused)
    return None


def check_honoured(honours: Honours, key: TensorSpec, value: TensorSpec) -> None:
    """Raise `RefusedError` for a choice of K's or V's quantizer that a whitelist lacks."""
    for name, spec in (("key", key), ("value", value)):
        if reason := honours.refusal(spec):
            raise RefusedError(f"{reason}, {name} is {spec}")
