"""End points of a group: scale and zero_point before any code exists, and the Lloyd refinement.

All functions see grouped tensors x [..., n] (one group per row) with a mask of the same shape
(False: padding, never part of a statistic) and return per-group tensors [..., 1].
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Group = Float[Tensor, "*g n"]
Mask = Bool[Tensor, "*g n"]
PerGroup = Float[Tensor, "*g 1"]

# Steps of the best uniform quantizer of a unit Gaussian, by bits (Max 1960): where Lloyd starts.
GAUSSIAN_STEP = {1: 1.5957691216, 2: 0.9956866859, 4: 0.3352006095, 8: 0.0308399834}
LLOYD_ITERATIONS = 10


def masked_mean(x: Group, mask: Mask) -> PerGroup:
    """Mean of the valid elements; 0 for an empty group. A constant group returns its constant."""
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    # About the first bound, so that rounding of the sum cannot move a constant group's mean.
    low, _ = masked_bounds(x, mask)
    return low + ((x - low) * mask).sum(-1, keepdim=True) / count


def masked_bounds(x: Group, mask: Mask) -> tuple[PerGroup, PerGroup]:
    """Minimum and maximum of the valid elements; (0, 0) for an empty group."""
    low = x.masked_fill(~mask, math.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~mask, -math.inf).amax(-1, keepdim=True)
    empty = ~mask.any(-1, keepdim=True)
    return low.masked_fill(empty, 0), high.masked_fill(empty, 0)


def nearest_code(x: Group, scale: PerGroup, zero_point: PerGroup, bits: int) -> Group:
    """Index of the nearest level, as floats. Ties go up: floor(t + 1/2), the same in every kernel.

    A group without width (scale 0) gets code 0.
    """
    steps = (x - zero_point) / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.floor(steps + 0.5).clamp(0, (1 << bits) - 1)
    return torch.where(scale > 0, codes, torch.zeros_like(codes))


def uniform_range(x: Group, mask: Mask, bits: int, shrink: float) -> tuple[PerGroup, PerGroup]:
    """(scale, zero_point) with the end points at shrink * min and shrink * max.

    A group of equal elements keeps them as they are (shrinking would move its only value).
    """
    low, high = masked_bounds(x, mask)
    factor = torch.where(high > low, shrink, 1.0).to(x.dtype)
    low, high = low * factor, high * factor
    return (high - low) / ((1 << bits) - 1), low


def lloyd_range(x: Group, mask: Mask, bits: int) -> tuple[PerGroup, PerGroup]:
    """(scale, zero_point) that minimise the group's squared error, by alternating projections.

    Assign each element its nearest level, then fit scale and zero_point to the assignment by least
    squares; neither step can raise the error. At 1 bit a fixed point has the two conditional means
    as its levels (2-means). Two starts, min/max and the best step for a Gaussian; the better end
    wins, so the result is never worse than min/max.
    """
    starts = (uniform_range(x, mask, bits, shrink=1.0), _gaussian_range(x, mask, bits))
    (scale, zero_point, error), other = (_descend(x, mask, bits, *start) for start in starts)
    better = other[2] < error
    return torch.where(better, other[0], scale), torch.where(better, other[1], zero_point)


def _descend(
    x: Group, mask: Mask, bits: int, scale: PerGroup, zero_point: PerGroup
) -> tuple[PerGroup, PerGroup, PerGroup]:
    for _ in range(LLOYD_ITERATIONS):
        codes = nearest_code(x, scale, zero_point, bits)
        scale, zero_point = _fit(x, codes, mask, scale, zero_point)
    decoded = nearest_code(x, scale, zero_point, bits) * scale + zero_point
    return scale, zero_point, masked_mean((decoded - x) ** 2, mask)


def _gaussian_range(x: Group, mask: Mask, bits: int) -> tuple[PerGroup, PerGroup]:
    mean = masked_mean(x, mask)
    sigma = masked_mean((x - mean) ** 2, mask).sqrt()
    low, high = masked_bounds(x, mask)
    top = (1 << bits) - 1
    scale = torch.minimum(GAUSSIAN_STEP[bits] * sigma, (high - low) / top)
    return scale, (mean - scale * top / 2).clamp(min=low, max=high)


def _fit(
    x: Group, codes: Group, mask: Mask, scale: PerGroup, zero_point: PerGroup
) -> tuple[PerGroup, PerGroup]:
    mean_x, mean_c = masked_mean(x, mask), masked_mean(codes, mask)
    spread = masked_mean((codes - mean_c) ** 2, mask)
    covariance = masked_mean((codes - mean_c) * (x - mean_x), mask)
    fitted = covariance / torch.where(spread > 0, spread, torch.ones_like(spread))
    # One code for all elements says nothing about the step: keep it, place its level on the mean.
    scale = torch.where(spread > 0, fitted, scale)
    return scale, mean_x - scale * mean_c


def symmetric_scale(x: Group, mask: Mask, bits: int, shrink: float, lloyd: bool) -> PerGroup:
    """Step of sign-and-magnitude levels: S = max|x| / (2**bits - 1) (InnerQ eq. 12), or Lloyd's.

    A group of one magnitude takes that as its step (code 1), which decodes exactly.
    """
    magnitude = x.abs()
    low, high = masked_bounds(magnitude, mask)
    scale = torch.where(high > low, high * shrink / ((1 << bits) - 1), high)
    if not lloyd:
        return scale
    for _ in range(LLOYD_ITERATIONS):
        codes = nearest_code(magnitude, scale, torch.zeros_like(scale), bits)
        power = masked_mean(codes * codes, mask)
        fitted = masked_mean(codes * magnitude, mask) / torch.where(power > 0, power, 1.0)
        scale = torch.where(power > 0, fitted, scale)
    return scale


def fitted_gain(
    x: Float[Tensor, "*b channels n"], x_hat: Float[Tensor, "*b channels n"]
) -> Float[Tensor, "*b 1 1"]:
    """The gain that makes scores unbiased, per block, from the block alone (padding must be 0).

    Signs keep 2/pi of what channels have in common but 1 of their own variance, so scores against
    a query that reads a common direction shrink, and one gain on all levels undoes it. The least
    squares gain for queries q is <E qq', cov(x, x_hat)> / <E qq', cov(x_hat)>; without queries we
    take the keys' own covariance for theirs (queries look where keys vary):

        gain = <S, cov(x, x_hat)> / <S, cov(x_hat)>,   S = cov(x)

    The same expression serves V, with outputs for scores. 1 where a block has no spread.
    """
    covariance = x @ x.transpose(-1, -2)
    cross = (covariance * (x @ x_hat.transpose(-1, -2))).sum((-1, -2), keepdim=True)
    power = (covariance * (x_hat @ x_hat.transpose(-1, -2))).sum((-1, -2), keepdim=True)
    return torch.where(power > 0, cross / torch.where(power > 0, power, 1.0), 1.0)
