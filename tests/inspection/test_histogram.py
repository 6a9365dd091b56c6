"""Histograms count what numpy counts, whatever comes first."""

import numpy as np
import pytest
import torch

from duotone.inspection.histogram import FINEST, MAX_BINS, Histogram


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("rising", [True, False])
def test_counts_are_numpys_and_nothing_is_lost(scale, rising):
    torch.manual_seed(0)
    parts = [scale * torch.randn(500) * factor for factor in (0.01, 1.0, 10.0)]
    parts = parts if rising else parts[::-1]
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    made = histogram.to_dict()
    edges = made["start"] + made["width"] * np.arange(len(made["counts"]) + 1)
    expected, _ = np.histogram(torch.cat(parts).double().numpy(), bins=edges)
    assert made["counts"] == expected.tolist()
    assert histogram.total == 1500
    assert len(made["counts"]) <= MAX_BINS


def test_few_numbers_keep_the_finest_bins():
    histogram = Histogram()
    histogram.add(torch.tensor([-FINEST, 0.0, FINEST / 2]))
    assert histogram.to_dict() == {"start": -FINEST, "width": FINEST, "counts": [1, 2]}


def test_nothing_counts_as_nothing():
    histogram = Histogram()
    histogram.add(torch.zeros(0))
    assert histogram.total == 0
    assert histogram.to_dict()["counts"] == []


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(wrong):
    with pytest.raises(ValueError, match="finite numbers"):
        Histogram().add(torch.tensor([0.0, wrong]))
