"""RMS: the outlier that an online Hadamard makes of a weight's mean, computed separately.

H's row 0 is constant, so column 0 of W H^T is sqrt(n) times the mean of each row of W. Where that
is the row's largest entry (MQuant eq. 8, with the absolute values that the paper leaves out),

    sqrt(n) |mean_i w_ji| > max_i |w_ji|,

column 0 sets the row's scale. That column stays in floating point. So does the activation's channel
0, which has the mean of a GELU's outputs and would set the static scale.

    y = W'[:, 1:] x'[1:] + w0 x'_0      the rank-1 term; W' and w0 = W'[:, 0] after the transform

Cost: one multiply-add per output and token, and w0's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def exceeds(weight: Tensor) -> Tensor:
    """[out] bool: rows of an untransformed weight [out, in] for which eq. 8 holds."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"expected a weight [out, in]; got {tuple(weight.shape)}.")
    wide = weight.double()
    return weight.shape[1] ** 0.5 * wide.mean(1).abs() > wide.abs().amax(1)


def wants_split(weight: Tensor) -> bool:
    """True if eq. 8 holds for any row: the GEMV of the split then serves at least that row."""
    return bool(exceeds(weight).any())


@dataclass(frozen=True)
class Split:
    """A transformed weight and its channel 0, stored separately.

    main [out, padded]: column 0 is zero. column [out]: w0, kept in floating point.
    """

    main: Tensor
    column: Tensor


def split_channel0(transformed: Tensor) -> Split:
    """Take column 0 off a weight [out, padded] that is transformed already."""
    if transformed.dim() != 2:
        raise ValueError(f"expected a weight [out, in]; got {tuple(transformed.shape)}.")
    main = transformed.clone()
    main[:, 0] = 0
    return Split(main, transformed[:, 0].clone())
