"""Expected gains of a calibrated basis and its widths, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from duotone.calibrate import Settings
from duotone.calibrate.run import Learned
from duotone.calibrate.settings import TENSOR_WEIGHTS, part_weights
from duotone.calibrate.transform import Classes, Name, expected_error

from .spectrum import (
    coding_gain_bits,
    coefficient_variances,
    distortion_at,
    effective_rank,
    plain_variance,
)

TENSORS = ("key", "value")


def layer_rows(learned: Learned, settings: Settings) -> list[dict[str, Any]]:
    """One JSON-safe row per layer and tensor: K of layer 0, V of layer 0, K of layer 1, ...

    spectrum: of the covariance in the metric, mean over kv heads, in units of squared error at the
    attention's output. effective_rank, coding_gain_bits: of each kv head's spectrum, then the mean.
    foreground_energy: of K, the share of tokens in front; None where spans are whole. bits: the
    allocation's bits for this tensor. error: expected with them; plain_error: with as many bits in
    every channel and no basis; gain: plain_error / error. Errors of a foreground count by its
    weight.
    """
    classes, rows = learned.widths(settings), []
    for layer, which in product(range(len(learned.moments)), TENSORS):
        row = _spectral(learned, layer, which)
        parted = which == "key" and "background" in learned.shares
        row["foreground_energy"] = learned.foreground[layer] if parted else None
        row["bits"], row["error"] = _coded(learned, classes, layer, which)
        row["plain_error"] = row["plain_variance"] * distortion_at(row["bits"])
        rows.append(row | {"gain": _ratio(row["plain_error"], row["error"])})
    return rows


def total_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """All layers together: errors are weighted sums, plain ones at the mean bits everywhere.

    So this gain includes the effect of moving bits between layers, and between K and V.
    """
    bits = sum(row["bits"] for row in rows) / len(rows)
    plain = sum(TENSOR_WEIGHTS[row["which"]] * row["plain_variance"] for row in rows)
    error = sum(TENSOR_WEIGHTS[row["which"]] * row["error"] for row in rows)
    plain *= distortion_at(bits)
    return {"bits": bits, "plain_error": plain, "error": error, "gain": _ratio(plain, error)}


def _spectral(learned: Learned, layer: int, which: str) -> dict[str, Any]:
    covariance = learned.moments[layer].covariance(which)
    basis = getattr(learned.bases, which)[layer]
    unit = learned.units[layer, which].to(covariance.device)
    spectra = coefficient_variances(basis, covariance).clamp_min(0)
    spectrum = (unit[:, None] * spectra).mean(0).sort(descending=True).values
    return {
        "layer": layer,
        "which": which,
        "spectrum": spectrum.tolist(),
        "effective_rank": float(effective_rank(spectra).mean()),
        "coding_gain_bits": float(coding_gain_bits(spectra).mean()),
        "plain_variance": float((unit * plain_variance(basis, covariance)).mean()),
    }


def _coded(
    learned: Learned, classes: Mapping[Name, Classes], layer: int, which: str
) -> tuple[float, float]:
    """(bits, expected error) of one tensor, means over its parts."""
    shares, weights = learned.shares, part_weights(learned.shares)
    bits = error = 0.0
    for part, share in shares.items():
        name = (layer, which, part)
        bits += share * sum(width * of for width, of in classes[name])
        error += share * weights[part] * expected_error(learned.spectra[name], classes[name])
    return bits, error / sum(share * weights[part] for part, share in shares.items())


def _ratio(plain: float, error: float) -> float:
    """Ratio of errors; 1 where nothing varies, so that there is no gain."""
    return plain / error if error else 1.0
