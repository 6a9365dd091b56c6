"""Integer product and epilogue in plain torch, with the same numbers as every kernel.

Autocast, which would round sums to 16 bit, is off in every product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.weights.modules.packed_weight import PackedWeight

# Sums of this many products of codes stay below 2^24, so fp32 holds every one of them exactly.
_EXACT_COLUMNS = (1 << 24) // (127 * 127)


def integer_product(x_q: Tensor, codes: Tensor) -> Tensor:
    """x_q @ codes^T, exact: int8 [tokens, in] and int8 [out, in] -> int32 [tokens, out]."""
    total = x_q.new_zeros(len(x_q), len(codes), dtype=torch.int32)
    with torch.autocast(x_q.device.type, enabled=False):
        for first in range(0, x_q.shape[1], _EXACT_COLUMNS):
            part = slice(first, first + _EXACT_COLUMNS)
            total += (x_q[:, part].float() @ codes[:, part].float().T).to(torch.int32)
    return total


def scaled(
    sums: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The epilogue: ((sums * row scale) * channel scale + x0 (x) w0) + bias, in fp32, then `dtype`.

    sums: int32 (or fp32 with groups already scaled) [tokens, out]. row_scale: float32 [tokens] or
    [1]. x0: [tokens] or None. bias: [out] or None.
    """
    y = sums.float() * row_scale.reshape(-1, 1)
    if weight.group_size is None:
        y = y * weight.scale
    if x0 is not None and weight.w0 is not None:
        y = y + x0.float()[:, None] * weight.w0.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def linear_int_reference(
    x_q: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `linear_int` in plain torch, on any device."""
    if weight.group_size is None:
        sums = integer_product(x_q, weight.unpacked())
    else:
        sums = _grouped_sums(x_q, weight)
    return scaled(sums, row_scale, weight, x0, bias, dtype)


def _grouped_sums(x_q: Tensor, weight: PackedWeight) -> Tensor:
    """((p_0 s_0) + (p_1 s_1)) + ..., p_g exact products of group g: float32 [tokens, out]."""
    codes, size = weight.unpacked(), weight.group_size
    total = x_q.new_zeros(len(x_q), len(codes), dtype=torch.float32)
    for group, scale in enumerate(weight.scale.T):
        part = slice(group * size, (group + 1) * size)
        total += integer_product(x_q[:, part], codes[:, part]) * scale
    return total


def linear_float_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_float` in plain torch: 16-bit activations, dequantized weights, fp32 sums."""
    with torch.autocast(x.device.type, enabled=False):
        y = x.float() @ weight.dequantized().T
    return (y if bias is None else y + bias.float()).to(x.dtype)
