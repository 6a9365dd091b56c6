"""Rows by layer against direct computations; reports."""

import json

import pytest
import torch

from duotone.calibrate import Settings, calibration_data
from duotone.calibrate.run import learn
from duotone.calibrate.transform import GAUSSIAN, klt
from duotone.inspection import inspect_model, layer_rows, total_row
from duotone.loading import Loaded
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def pictured():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    return loaded, calibration_data(loaded, [TINY_TASK], 4, 4)


@pytest.fixture(scope="module")
def learned(pictured):
    loaded, data = pictured
    return learn(loaded, data.batches, Settings(bits=1.0))


@pytest.fixture(scope="module")
def report(pictured):
    loaded, data = pictured
    stages = []
    made = inspect_model(loaded, data, progress=lambda *of: stages.append(of))
    assert stages == [(1, 2), (2, 2)]
    return made


@pytest.mark.parametrize("which", ["key", "value"])
def test_spectra_are_those_that_bases_are_made_of(learned, which):
    rows = [row for row in layer_rows(learned, Settings()) if row["which"] == which]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for row, layer in zip(rows, learned.moments, strict=True):
        metric = layer.scores if which == "key" else layer.output
        level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        spectra, _ = klt(layer.covariance(which), metric / level, Settings().regularization)
        unit = learned.units[row["layer"], which]
        expected = (unit[:, None] * spectra).mean(0)
        torch.testing.assert_close(
            torch.tensor(row["spectrum"], dtype=torch.float64), expected, rtol=1e-3, atol=1e-4
        )
        assert 1 < row["effective_rank"] < 16
        assert row["coding_gain_bits"] > 0


def test_bits_of_rows_are_the_budget_and_errors_add_up(learned):
    rows = layer_rows(learned, Settings(bits=1.0))
    total = total_row(rows)
    assert total["bits"] == pytest.approx(1.0, abs=0.05)
    error = sum((0.5 if row["which"] == "key" else 1.0) * row["error"] for row in rows)
    assert total["error"] == pytest.approx(error)
    assert total["gain"] == pytest.approx(total["plain_error"] / error)
    assert [row["foreground_energy"] is None for row in rows] == [False, True] * 3


def test_one_width_for_all_channels_of_whole_spans_leaves_the_basis_and_the_spans_own_order(
    learned, monkeypatch
):
    """Without parts and with one width, the error is the spectrum's sum at that width."""
    monkeypatch.setattr("duotone.calibrate.transform.WIDTHS", (0, 2))
    settings = Settings(bits=2.0, foreground=None)
    whole = learned.__class__(
        learned.moments,
        learned.bases,
        learned.units,
        {"visual": 1.0},
        {name: s for name, s in learned.spectra.items() if name[2] == "visual"},
        {},
    )
    for row in layer_rows(whole, settings):
        spectrum = whole.spectra[row["layer"], row["which"], "visual"]
        assert row["bits"] == 2
        assert row["error"] == pytest.approx(GAUSSIAN[2] * float(spectrum.sum()))
        assert row["plain_error"] == pytest.approx(GAUSSIAN[2] * row["plain_variance"])


def test_reports_are_json_and_say_what_was_measured(report):
    assert json.dumps(json.loads(json.dumps(report))) == json.dumps(report)
    assert report["schema"] == "duotone.inspect/2"
    assert report["header"]["data"][0]["task"] == "tiny"
    assert [row["which"] for row in report["layers"]] == ["key", "value"] * 3
    assert all(0.4 < row["foreground_energy"] < 1 for row in report["layers"][::2])
