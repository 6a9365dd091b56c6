"""GPTQ (Frantar et al. 2023): round columns one by one, later columns make up for the error.

    minimise || (W - Q) X ||^2, H = X X^T
    after column j:  W[:, k] -= (w_j - q_j) / U[j, j] * U[j, k]   for k > j

with U the upper Cholesky factor of H^-1. Columns go by falling diagonal of H (act-order). Scales
are found before, from the weight itself, so that groups stay contiguous in spite of the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.weights.methods.rtn import column_scales, rounded, weight_scale

BLOCK = 128
DAMPING = 0.01
MOST_DAMPING = 10.0


@dataclass(frozen=True)
class GptqResult:
    """codes [out, in] (float32), scale [out] or [out, groups], and the damping and errors.

    damping: share of the mean diagonal that was added. error, error_rtn: || (W - Q) X ||^2 of
    these codes and of plain rounding with the same scales.
    """

    codes: Tensor
    scale: Tensor
    damping: float
    error: float
    error_rtn: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group: int | None = None,
    *,
    clip: bool = False,
) -> GptqResult:
    """Codes of a weight [out, in] for inputs with second moments `hessian` [in, in].

    Channels that were never active (diagonal 0) are rounded to nearest. A Hessian that has no
    Cholesky factor gets ten times the damping, again and again. Plain rounding never silently
    replaces GPTQ (in the released code it does).
    Errors: ValueError for shapes that do not fit, a Hessian that is not finite, or one that has no
    factor with damping MOST_DAMPING.
    """
    check_moments(weight, hessian)
    weight, hessian = weight.float(), hessian.double()
    scale = weight_scale(weight, bits, group, clip)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor, used = _inverse_factor(hessian[order][:, order])
    columns = column_scales(scale, weight.shape[1])[:, order]
    codes = torch.empty_like(weight)
    codes[:, order] = _rounded_in_order(weight[:, order], columns, factor.float(), bits)
    plain = rounded(weight, column_scales(scale, weight.shape[1]), bits)
    errors = [
        output_error(weight, c * column_scales(scale, weight.shape[1]), hessian)
        for c in (codes, plain)
    ]
    return GptqResult(codes, scale, used, *errors)


def check_moments(weight: Tensor, hessian: Tensor) -> None:
    """Raise ValueError for second moments [in, in] that do not fit a weight [out, in]."""
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ValueError(
            f"a weight [out, in] = {tuple(weight.shape)} needs second moments [{columns}, "
            f"{columns}] of its inputs, got {tuple(hessian.shape)}"
        )
    if not bool(hessian.isfinite().all()):
        raise ValueError(
            "second moments of the inputs must be finite, got inf or nan; does the model overflow "
            "on the calibration data? Load it in bfloat16 or float32"
        )


def _inverse_factor(hessian: Tensor) -> tuple[Tensor, float]:
    """(upper Cholesky factor of the inverse, the damping it took)."""
    diagonal, damping = hessian.diagonal(), DAMPING
    mean = float(diagonal.mean()) or 1.0
    silent = (diagonal == 0).double() * mean
    while damping <= MOST_DAMPING:
        damped = hessian + torch.diag(silent + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper, damping
        damping *= 10
    raise ValueError(
        f"second moments of the inputs have no Cholesky factor with damping up to {MOST_DAMPING:g} "
        "times their mean; they are no sum of squares. Calibrate with other samples, or use RTN"
    )


def _rounded_in_order(weight: Tensor, scale: Tensor, factor: Tensor, bits: int) -> Tensor:
    """Codes of columns in the order they lie; `weight` is changed."""
    codes = torch.empty_like(weight)
    for first in range(0, weight.shape[1], BLOCK):
        block = slice(first, first + BLOCK)
        part, rows = weight[:, block].clone(), factor[block, block]
        errors = torch.empty_like(part)
        for j in range(part.shape[1]):
            column = first + j
            codes[:, column] = rounded(part[:, j], scale[:, column], bits)
            wrong = part[:, j] - codes[:, column] * scale[:, column]
            errors[:, j] = wrong / rows[j, j]
            part[:, j:] -= errors[:, j, None] * rows[j, None, j:]
        weight[:, first + BLOCK :] -= errors @ factor[block, first + BLOCK :]
    return codes


def output_error(weight: Tensor, restored: Tensor, hessian: Tensor) -> float:
    """|| (W - Q) X ||^2 of a weight [out, in] and its decoded codes."""
    wrong = weight - restored
    return float(((wrong @ hessian.float()) * wrong).sum())
