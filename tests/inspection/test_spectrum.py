"""Numbers of spectra that are known beforehand."""

import math

import pytest
import torch

from duotone.calibrate.transform import GAUSSIAN, klt
from duotone.inspection.spectrum import (
    coding_gain_bits,
    coefficient_variances,
    distortion_at,
    effective_rank,
    plain_variance,
)

SPECTRA = {
    "flat": ([3.0] * 8, 8.0, 0.0),
    "one channel": ([5.0] + [0.0] * 7, 1.0, None),
    "half of them": ([2.0] * 4 + [0.0] * 4, 4.0, None),
    "nothing": ([0.0] * 8, 8.0, 0.0),
    # entropy 1.5 bits; means 1 and 2^(-1/2) of (2, 1/2, 1/2), repeated: 1/2 log2 of the ratio
    "powers of two": ([0.5, 0.25, 0.25], 2**1.5, (math.log2(1 / 3) + (1 + 2 + 2) / 3) / 2),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_ranks_and_gains(name):
    spectrum, rank, gain = SPECTRA[name]
    assert float(effective_rank(torch.tensor(spectrum))) == pytest.approx(rank)
    found = float(coding_gain_bits(torch.tensor(spectrum)))
    assert found == pytest.approx(gain, abs=1e-9) if gain is not None else 0 < found < 10


def test_scale_changes_neither_rank_nor_gain_and_batches_stay_apart():
    torch.manual_seed(0)
    spectra = torch.rand(3, 16)
    for measure in (effective_rank, coding_gain_bits):
        torch.testing.assert_close(measure(1000 * spectra), measure(spectra))
        torch.testing.assert_close(measure(spectra)[1], measure(spectra[1]))


def test_variances_of_coefficients_are_the_spectrum():
    torch.manual_seed(0)
    rows, queries = torch.randn(2, 2, 50, 8, dtype=torch.float64)
    covariance, metric = rows.mT @ rows / 50, queries.mT @ queries / 50
    spectrum, basis = klt(covariance, metric, 0.1)
    torch.testing.assert_close(coefficient_variances(basis, covariance), spectrum)
    level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
    whole = metric + 0.1 * level[:, None, None] * torch.eye(8)
    expected = (whole * covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(plain_variance(basis, covariance), expected)


def test_errors_between_two_widths_are_shared():
    assert [distortion_at(bits) for bits in GAUSSIAN] == list(GAUSSIAN.values())
    assert distortion_at(0.25) == pytest.approx(0.75 + 0.25 * GAUSSIAN[1])
    assert distortion_at(6) == pytest.approx((GAUSSIAN[4] + GAUSSIAN[8]) / 2)


@pytest.mark.parametrize("bits", [-0.1, 8.5])
def test_bits_that_no_code_has_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits must lie in \[0, 8\]"):
        distortion_at(bits)
