"""The epilogue as a kernel of its own, for products that come from elsewhere as int32."""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton.epilogue import epilogue
from duotone.weights.modules.packed_weight import PackedWeight


@triton.jit
def scale_kernel(
    sums,
    y,
    row_scale,
    out_scale,
    x0,
    w0,
    bias,
    tokens,
    outs,
    row_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    o_row = tl.program_id(0) * BM + tl.arange(0, BM)
    o_out = tl.program_id(1) * BN + tl.arange(0, BN)
    o_y = o_row.to(tl.int64)[:, None] * outs + o_out[None, :]
    m_y = (o_row < tokens)[:, None] & (o_out < outs)[None, :]
    b_sums = tl.load(sums + o_y, mask=m_y, other=0)
    b_y = epilogue(
        b_sums, o_row, o_out, tokens, outs, row_scale, row_stride, out_scale, x0, w0, bias, 1.0
    )
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_y)


def scale_sums(
    sums: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Launch: int32 sums [tokens, out], contiguous, to y of `dtype`."""
    tokens, outs = sums.shape
    y = torch.empty(tokens, outs, dtype=dtype, device=sums.device)
    scale_kernel[(triton.cdiv(tokens, 8), triton.cdiv(outs, 512))](
        sums,
        y,
        row_scale,
        weight.scale,
        x0,
        weight.w0,
        bias,
        tokens,
        outs,
        0 if row_scale.numel() == 1 else 1,
        BM=8,
        BN=512,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y
