"""One budget for codes and parameters."""

import pytest
import torch

from duotone.calibrate.budget import parameter_bits, widths_of

SHARES = {"visual": 0.45, "background": 0.55}


def spectra(layers=3, channels=64):
    falling = 0.01 ** (torch.arange(channels, dtype=torch.double) / channels)
    return {
        (layer, which, part): falling / (1 + layer)
        for layer in range(layers)
        for which in ("key", "value")
        for part in SHARES
    }


def code_bits(classes):
    spent = sum(SHARES[name[2]] * b * s for name, rows in classes.items() for b, s in rows)
    return spent / sum(SHARES[name[2]] for name in classes)


def test_parameters_are_a_zero_point_per_channel_and_a_scale_per_coded_one():
    classes = {
        (0, "key", "visual"): ((2, 0.25),),
        (0, "value", "visual"): ((4, 0.5),),
        (0, "key", "background"): ((1, 0.125),),
        (0, "value", "background"): ((1, 0.125),),
    }
    # Per number of K and V: two parts, each with zero_points and its share of scales.
    per_span = 16 * (2 + (0.25 + 0.125 + 0.5 + 0.125) / 2)
    assert parameter_bits(classes, SHARES, 64, 16) == pytest.approx(per_span / 64)


@pytest.mark.parametrize("tokens", [24.0, 49.0, 100.0, 256.0, 3328.0])
@pytest.mark.parametrize("bits", [1.0, 2.0])
def test_what_small_parameters_save_goes_to_codes(bits, tokens):
    plain = widths_of(spectra(), bits, SHARES)
    found = widths_of(spectra(), bits, SHARES, tokens=tokens)
    allowed = code_bits(plain) + parameter_bits(plain, SHARES, tokens, 16)
    taken = code_bits(found) + parameter_bits(found, SHARES, tokens, 8)
    # A unit of one tensor is left over at most, in either.
    assert allowed - 0.1 < taken < allowed + 0.05
    assert code_bits(found) >= code_bits(plain)
    assert code_bits(found) - code_bits(plain) < 20 * (1 + 1) * 2 / tokens


def test_long_spans_and_streams_have_nothing_to_spend():
    plain = widths_of(spectra(), 1.0, SHARES)
    assert widths_of(spectra(), 1.0, SHARES, tokens=1e6) == plain


def test_codes_never_get_more_than_the_widest_width():
    found = widths_of(spectra(), 4.0, SHARES, tokens=16.0)
    assert set(found.values()) == {((4, 1.0),)}
