"""Widths of all tensors of a model under one budget of bits, parameters included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import transform
from .settings import PLAIN_BITS, SMALL_BITS, part_weights, tensor_weights
from .transform import Classes, Name, allocate

EXPONENT_BITS = 16  # of a part, which its scales and its zero_points of 8 bits share
HALVINGS = 12  # of a range of bits


def widths_of(
    spectra: Mapping[Name, Any],
    bits: float,
    shares: Mapping[str, float],
    layers: Sequence[float] | None = None,
    tokens: float | None = None,
) -> dict[Name, Classes]:
    """Classes of every tensor by `allocate`.

    bits: of codes, mean per number. shares: of the tokens, by part. layers: factors of the layers'
    errors; None: 1. tokens: mean of a span whose parameters have 8 bits. Codes then get what is
    left of the true bits that `bits` would take beside parameters of 16. None: codes get `bits`.
    """
    parts, tensors = part_weights(shares), tensor_weights(shares)
    layers = layers or [1.0] * (1 + max(name[0] for name in spectra))
    weights = {(i, w, part): layers[i] * tensors[w] * parts[part] for i, w, part in spectra}
    each = {name: shares[name[2]] for name in spectra}

    def allocated(codes: float) -> dict[Name, Classes]:
        return allocate(spectra, min(codes, transform.WIDTHS[-1]), weights, each)

    found = allocated(bits)
    if tokens is None:
        return found
    exponents = EXPONENT_BITS / len(next(iter(spectra.values())))

    def small(found: Mapping[Name, Classes]) -> float:
        return parameter_bits(found, shares, tokens, SMALL_BITS, exponents)

    # More codes, more channels with scales: the sum rises with the codes.
    allowed = bits + parameter_bits(found, shares, tokens, PLAIN_BITS)
    return most(allocated, lambda codes, it: codes + small(it) <= allowed, bits, max(bits, allowed))


def most(
    allocated: Callable[[float], dict[Name, Classes]],
    fits: Callable[[float, dict[Name, Classes]], bool],
    low: float,
    high: float,
) -> dict[Name, Classes]:
    """Classes of the most code bits from `low` to `high` that fit; those of `low`, if none do."""
    found = allocated(low)
    for _ in range(HALVINGS):
        codes = (low + high) / 2
        tried = allocated(codes)
        if fits(codes, tried):
            low, found = codes, tried
        else:
            high = codes
    return found


def parameter_bits(
    classes: Mapping[Name, Classes],
    shares: Mapping[str, float],
    tokens: float,
    bits: int,
    exponents: float = 0.0,
) -> float:
    """Bits of parameters per number of spans of so many tokens.

    A channel has a zero_point in every part, and a scale where it has codes. bits: of each.
    exponents: bits per channel of those that a part's scales and zero_points share.
    """
    coded = sum(sum(share for width, share in rows if width) for rows in classes.values())
    each = bits * (len(classes) + coded) + exponents * len(classes)
    return each / tokens / sum(shares[part] for *_, part in classes)
