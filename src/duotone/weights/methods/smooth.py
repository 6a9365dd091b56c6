"""SmoothQuant (Xiao et al. 2023): outlier channels of activations move into the weights.

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha);   norm weight, bias / s;   linear columns * s

This is exact for the linears after one norm. s is found over all of them together (eq. 4 there). A
norm that multiplies by 1 + weight (Gemma) takes (1 + weight) / s - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.norms import norm_parts

SMALLEST = 1e-5


def smoothing_factors(activation: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """s [in] from the largest |x_j| [in] and weights [out, in] of the linears that read x."""
    of_weights = torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)
    strong = activation.float().clamp(min=SMALLEST).pow(alpha)
    return (strong / of_weights.clamp(min=SMALLEST).pow(1 - alpha)).clamp(min=SMALLEST)


@torch.no_grad()
def smooth(
    norm: nn.Module, linears: Sequence[nn.Linear], activation: Tensor, alpha: float = 0.5
) -> None:
    """Move outliers of x = norm(...) into the linears, in place; the model's function stays.

    Errors: ValueError for a norm without weight, or maxima of another size.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape != activation.shape:
        found = None if weight is None else tuple(weight.shape)
        raise ValueError(
            "smoothing needs a norm with one weight per channel of its output, got weight "
            f"{found} and {tuple(activation.shape)} maxima; was the norm folded already?"
        )
    factors = smoothing_factors(activation, [linear.weight for linear in linears], alpha)
    fold(norm, linears, factors)


@torch.no_grad()
def fold(
    source: nn.Module,
    linears: Sequence[nn.Linear],
    factors: Tensor,
    rows: slice = slice(None),
) -> None:
    """Divide outputs `rows` of a norm or a linear by factors [in], multiply its readers' columns.

    In place; the function stays. Errors: ValueError for a norm of no known kind.
    """
    parameters = [source.weight, getattr(source, "bias", None)]
    if source.weight.dim() == 1 and (offset := norm_parts(source).offset):
        factors = _fold_gain(parameters.pop(0).data, offset, factors)
    for parameter in parameters:
        if parameter is not None:
            part = parameter.data[rows]
            part.copy_(part.float() / (factors if part.dim() == 1 else factors[:, None]))
    for linear in linears:
        linear.weight.data.copy_(linear.weight.data.float() * factors)


def _fold_gain(weight: Tensor, offset: float, factors: Tensor) -> Tensor:
    """Divide offset + weight by factors, in place; return the factors that were taken.

    A weight near -offset has few digits left in 16 bit: what it is rounded to decides the factor.
    Where nothing but 0 would be left of a gain, the channel stays as it is.
    """
    gain = offset + weight.double()
    kept = weight.clone()
    weight.copy_(gain / factors - offset)
    lost = ((offset + weight.double()) == 0) & (gain != 0)
    weight.copy_(torch.where(lost, kept, weight))
    left = offset + weight.double()
    taken = torch.where(left == 0, torch.ones_like(gain), gain / left)
    return taken.to(factors.dtype)
