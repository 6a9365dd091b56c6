"""Numbers of a spectrum: its effective dimensions, and the gain of decorrelation.

Pure functions of variances; nothing here knows models.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.calibrate.transform import GAUSSIAN

# Eigenvalues below this share of their mean are raised to it. Few tokens leave zeros, whose
# geometric mean is 0 and whose coding gain has no bound.
SMALLEST = 1e-6
Spectrum = Float[Tensor, "*b channels"]


def effective_rank(spectrum: Spectrum) -> Float[Tensor, "*b"]:
    """exp(entropy) of the spectrum as shares of its sum (Roy and Vetterli, 2007).

    1 if one channel has all the variance; `channels` if all have the same or none has any.
    """
    total = spectrum.double().sum(-1, keepdim=True)
    even = torch.full_like(spectrum.double(), 1 / spectrum.shape[-1])
    shares = torch.where(total > 0, spectrum.double() / total.clamp_min(1e-300), even)
    return torch.special.entr(shares).sum(-1).exp()


def coding_gain_bits(spectrum: Spectrum) -> Float[Tensor, "*b"]:
    """1/2 log2(arithmetic mean / geometric mean): bits per number that unequal widths save.

    At equal error and many bits, against the same bits in channels of equal variance.
    """
    spectrum = spectrum.double()
    mean = spectrum.mean(-1)
    floored = torch.maximum(spectrum, SMALLEST * mean[..., None]).clamp_min(1e-300)
    gain = (floored.mean(-1).log2() - floored.log2().mean(-1)) / 2
    return torch.where(mean > 0, gain, torch.zeros_like(gain))


def coefficient_variances(
    basis: Float[Tensor, "*b channels channels"], covariance: Float[Tensor, "*b channels channels"]
) -> Spectrum:
    """diag(E^T S E): the spectrum, where E is the basis of this covariance (`transform.klt`)."""
    basis = basis.double().to(covariance.device)
    return torch.einsum("...dc,...de,...ec->...c", basis, covariance.double(), basis)


def plain_variance(
    basis: Float[Tensor, "*b channels channels"], covariance: Float[Tensor, "*b channels channels"]
) -> Float[Tensor, "*b"]:
    """sum_c C_cc S_cc: the channels' loss in the metric without a change of basis.

    C = E E^T is the metric that the basis E was made with. Errors of channels are taken as
    uncorrelated, so only its diagonal counts.
    """
    metric = basis.double().square().sum(-1).to(covariance.device)
    return (metric * covariance.double().diagonal(dim1=-2, dim2=-1)).sum(-1)


def distortion_at(bits: float) -> float:
    """Share of the variance that stays at mean `bits`; channels share the two nearest widths.

    Errors: ValueError for bits outside those of `GAUSSIAN`.
    """
    widths = sorted(GAUSSIAN)
    if not widths[0] <= bits <= widths[-1]:
        raise ValueError(f"bits must lie in [{widths[0]}, {widths[-1]}], got {bits:g}")
    upper = next(width for width in widths if width >= bits)
    lower = max(width for width in widths if width <= bits)
    part = 0.0 if upper == lower else (bits - lower) / (upper - lower)
    return (1 - part) * GAUSSIAN[lower] + part * GAUSSIAN[upper]
