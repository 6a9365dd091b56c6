"""Codes of unequal steps: the Lloyd-Max levels of a unit Gaussian, scaled to the norm of a group.

After a rotation, numbers of a group are nearly Gaussian; no group then needs levels of its own.
x = codebook[code] * scale, with one scale per group and no zero_point.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from duotone.tools.kept import cached_once, kept

UNIFORM, GAUSSIAN = "uniform", "gaussian"
# Positive half of the levels of least squared error for a unit Gaussian, by bits (Max 1960).
POSITIVE = {
    1: (0.7978845608,),
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (
        *(0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565),
        *(1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
    ),
}


@cached_once
def gaussian_levels(
    bits: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " levels"]:
    """Levels in rising order, kept per device: a captured step copies nothing."""
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float64)
    both = torch.cat([-positive.flip(0), positive])
    return kept(lambda: both.to(dtype=dtype, device=device), device)


def decoded_levels(
    codes: UInt8[Tensor, "*b"], codebook: str, bits: int, dtype: torch.dtype
) -> Float[Tensor, "*b"]:
    """Numbers that codes stand for, before scale and zero_point."""
    if codebook == UNIFORM:
        return codes.to(dtype)
    return gaussian_levels(bits, dtype, codes.device)[codes.long()]


def gaussian_codes(
    x: Float[Tensor, "*g n"], mask: Tensor, bits: int
) -> tuple[Float[Tensor, "*g n"], Float[Tensor, "*g 1"]]:
    """(codes, scale) of groups (padding must be 0): the nearest levels, with the group's norm.

    Levels are compared with x / (|x| / sqrt(n)). scale = |x| / |levels of the codes|, so that a
    decoded group has its exact norm (TurboQuant's norm correction). Ties go up.
    """
    levels = gaussian_levels(bits, x.dtype, x.device)
    norm = x.square().sum(-1, keepdim=True).sqrt()
    unit = norm / mask.sum(-1, keepdim=True).clamp_min(1).sqrt()
    scaled = x / torch.where(unit > 0, unit, 1.0)
    codes = torch.searchsorted((levels[1:] + levels[:-1]) / 2, scaled.contiguous(), right=True)
    chosen = levels[codes] * mask
    length = chosen.square().sum(-1, keepdim=True).sqrt()
    return codes.to(x.dtype) * mask, norm / torch.where(length > 0, length, 1.0)
