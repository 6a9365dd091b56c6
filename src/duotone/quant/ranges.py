"""End points of a group: scale and zero_point before any code exists, and the Lloyd refinement.

All functions take grouped tensors x [..., n] (one group per row) with a mask of the same shape,
and return per-group tensors [..., 1]. Where the mask is False, padding enters no statistic.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Group = Float[Tensor, "*g n"]
Mask = Bool[Tensor, "*g n"]
PerGroup = Float[Tensor, "*g 1"]

# Steps of the best uniform quantizer of a unit Gaussian, by bits (Max 1960): where Lloyd starts.
GAUSSIAN_STEP = {
    1: 1.5957691216,
    2: 0.9956866859,
    3: 0.5860194455,
    4: 0.3352006095,
    8: 0.0308399834,
}
LLOYD_ITERATIONS = 8
# Between the cells of two neighbouring Lloyd-Max levels of 2 bits, in OSCAR's code.
LLOYD_EDGE = 0.9810652732849121
# Bounds of `energy_gain`.
MIN_GAIN, MAX_GAIN = 0.5, 3.0


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


def nearest_code(
    x: Group, scale: PerGroup, zero_point: PerGroup, bits: int, ties: str = "up"
) -> Group:
    """Index of the nearest level, as floats. Ties go up: floor(t + 1/2), the same in every kernel.

    ties: "even" takes the even one of two codes instead. A group without width (scale 0) gets
    code 0.
    """
    steps = (x - zero_point) / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.floor(steps + 0.5) if ties == "up" else torch.round(steps)
    codes = codes.clamp(0, (1 << bits) - 1)
    return torch.where(scale > 0, codes, torch.zeros_like(codes))


def clipped(
    x: Float[Tensor, "*b tokens channels"], share: float
) -> Float[Tensor, "*b tokens channels"]:
    """Bound each token's numbers by the magnitude of rank floor(share * channels), from 0.

    OSCAR's released threshold: the sorted magnitude at that index, at most the last one.
    """
    channels = x.shape[-1]
    rank = min(int(share * channels), channels - 1)
    bound = x.abs().sort(-1).values[..., rank : rank + 1]
    return torch.minimum(torch.maximum(x, -bound), bound)


def uniform_range(x: Group, mask: Mask, bits: int, shrink: float) -> tuple[PerGroup, PerGroup]:
    """(scale, zero_point) with the end points at shrink * min and shrink * max.

    A group of equal elements keeps them as they are (shrinking would move its only value).
    """
    low, high = masked_bounds(x, mask)
    factor = torch.where(high > low, shrink, 1.0).to(x.dtype)
    low, high = low * factor, high * factor
    return (high - low) / ((1 << bits) - 1), low


def deviation_range(x: Group, mask: Mask) -> tuple[PerGroup, PerGroup]:
    """(scale, zero_point) of four levels about the mean whose cells end at Lloyd-Max edges.

    A group of equal elements keeps them.
    """
    mean = masked_mean(x, mask)
    deviation = masked_mean(((x - mean) * mask).square(), mask).sqrt()
    scale = LLOYD_EDGE * deviation
    return scale, mean - 1.5 * scale


def lloyd_range(x: Group, mask: Mask, bits: int) -> tuple[PerGroup, PerGroup]:
    """(scale, zero_point) that minimise the group's squared error, by alternating projections.

    Assign each element its nearest level, then fit scale and zero_point to the assignment by least
    squares; neither step can raise the error. At 1 bit a fixed point has the two conditional means
    as its levels (2-means). There are two starts, min/max and the best step for a Gaussian. The
    better result wins, so it is never worse than min/max.
    """
    # About the mean, where rounding is small and a group of equal elements is exactly zero.
    mean = masked_mean(x, mask)
    centred = (x - mean) * mask
    starts = (uniform_range(centred, mask, bits, shrink=1.0), _gaussian_range(centred, mask, bits))
    (scale, zero_point, error), other = (_descend(centred, mask, bits, *s) for s in starts)
    better = other[2] < error
    zero_point = torch.where(better, other[1], zero_point)
    return torch.where(better, other[0], scale), mean + zero_point


def _descend(
    x: Group, mask: Mask, bits: int, scale: PerGroup, zero_point: PerGroup
) -> tuple[PerGroup, PerGroup, PerGroup]:
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    for _ in range(LLOYD_ITERATIONS):
        codes = nearest_code(x, scale, zero_point, bits) * mask
        scale, zero_point = _fit(x, codes, count, scale)
    decoded = (nearest_code(x, scale, zero_point, bits) * scale + zero_point) * mask
    return scale, zero_point, (decoded - x).square().sum(-1, keepdim=True)


def _gaussian_range(x: Group, mask: Mask, bits: int) -> tuple[PerGroup, PerGroup]:
    """The best levels if the centred x were Gaussian, inside the group's range."""
    sigma = masked_mean(x * x, mask).sqrt()
    low, high = masked_bounds(x, mask)
    top = (1 << bits) - 1
    scale = torch.minimum(GAUSSIAN_STEP[bits] * sigma, (high - low) / top)
    return scale, (-scale * top / 2).clamp(min=low, max=high)


def _fit(
    x: Group, codes: Group, count: Int[Tensor, "*g 1"], scale: PerGroup
) -> tuple[PerGroup, PerGroup]:
    """Least squares of x on its codes; both are 0 at padding."""
    mean_x = x.sum(-1, keepdim=True) / count
    mean_c = codes.sum(-1, keepdim=True) / count
    spread = codes.square().sum(-1, keepdim=True) - count * mean_c * mean_c
    covariance = (codes * x).sum(-1, keepdim=True) - count * mean_c * mean_x
    # One code for all elements says nothing about the step: keep it, place its level on the mean.
    # Between two distinct codes the spread is at least 1/2.
    fitted = torch.where(spread > 0.25, covariance / spread.clamp_min(0.25), scale)
    return fitted, mean_x - fitted * mean_c


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
    """Gain that makes scores unbiased, per block, from the block alone (padding must be 0).

    Signs keep 2/pi of the variance that channels share but all of their own variance. Scores
    against a query that reads a common direction therefore shrink; one gain on all levels undoes
    this. The least squares gain for queries q is <E qq', cov(x, x_hat)> / <E qq', cov(x_hat)>.
    Without queries the keys' own covariance takes their place (queries look where keys vary):

        gain = <S, cov(x, x_hat)> / <S, cov(x_hat)>,   S = cov(x)

    The same expression serves V, with outputs for scores. The gain is 1 where a block has no
    spread.
    """
    covariance = x @ x.transpose(-1, -2)
    cross = (covariance * (x @ x_hat.transpose(-1, -2))).sum((-1, -2), keepdim=True)
    power = (covariance * (x_hat @ x_hat.transpose(-1, -2))).sum((-1, -2), keepdim=True)
    return torch.where(power > 0, cross / torch.where(power > 0, power, 1.0), 1.0)


def energy_weights(
    centred: Float[Tensor, "*b channels n"], power: float
) -> Float[Tensor, "*b 1 n"]:
    """Weight of each token: its energy to `power`, relative to the block's largest (padding 0)."""
    energy = centred.square().sum(-2, keepdim=True)
    top = energy.amax(-1, keepdim=True)
    return (energy / torch.where(top > 0, top, 1.0)) ** power


def energy_gain(
    x: Float[Tensor, "*b channels n"], x_hat: Float[Tensor, "*b channels n"], power: float
) -> Float[Tensor, "*b channels 1"]:
    """Gain of each channel by least squares, tokens weighted by energy (padding must be 0).

    An attention that picks few tokens picks the ones that stand out. Levels fitted to all tokens
    alike fall short of these. With x, x_hat about the block's mean and w_t = |x_t| ** (2 power),

        gain_c = sum_t(w_t x_tc x_hat_tc) / sum_t(w_t x_hat_tc^2)

    within MIN_GAIN and MAX_GAIN, since one token may outweigh all others. The gain is 1 where all
    is zero.
    """
    weights = energy_weights(x, power)
    cross = (weights * x * x_hat).sum(-1, keepdim=True)
    own = (weights * x_hat * x_hat).sum(-1, keepdim=True)
    gain = torch.where(own > 0, cross / torch.where(own > 0, own, 1.0), 1.0)
    return gain.clamp(MIN_GAIN, MAX_GAIN)
