"""Score calibration (CalibQuant eq. 7-8): an affine map of visual scores before the softmax.

    g(x) = (x - gamma) * slope + gamma - tau1
    slope = ((delta - tau2) - (gamma - tau1)) / (delta - gamma)

gamma and delta are the minimum and maximum of the scores over the visual keys, per sequence, query
head and query. g maps [gamma, delta] onto [gamma - tau1, delta - tau2].

One case differs from the paper: where delta - gamma + tau1 - tau2 <= 0, the slope of eq. 7 is zero
or negative. It loses or reverses the order of the keys; neither the paper nor its code treats this
case. Here the slope is clamped from below at `MIN_SLOPE`, so the order always survives. The *upper*
end of the image stays at delta - tau2: the strongest key keeps the score of eq. 7. A span of equal
scores (delta == gamma up to `MIN_WIDTH`) has slope 1 and moves by -tau2 as a whole.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

MIN_SLOPE = 1e-3
# Scores this close are equal: the slope of a narrower span would not be a number.
MIN_WIDTH = 1e-20


def calibration_affine(
    gamma: Float[Tensor, "*b"], delta: Float[Tensor, "*b"], tau: tuple[float, float]
) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """Return (slope, offset) with g(x) = slope * x + offset, for the given score ranges."""
    tau1, tau2 = tau
    width = delta - gamma
    flat = width <= MIN_WIDTH
    slope = 1 + (tau1 - tau2) / torch.where(flat, torch.ones_like(width), width)
    slope = torch.where(flat, torch.ones_like(slope), slope.clamp_min(MIN_SLOPE))
    return slope, delta - tau2 - slope * delta
