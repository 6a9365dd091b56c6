"""Epilogue of every integer product: scales, the rank-1 term, bias, in the reference's order."""

# ruff: noqa: D103
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_scale(scale, o_out, i_group, outs, groups):
    # scale [outs, groups] of one group -> [BN]
    return tl.load(scale + o_out * groups + i_group, mask=o_out < outs, other=0.0)


@triton.jit
def epilogue(
    sums,
    o_row,
    o_out,
    tokens,
    outs,
    row_scale,
    row_stride,
    out_scale,
    x0,
    w0,
    bias,
    FACTOR: tl.constexpr,
):
    # sums [BM, BN] of rows o_row and channels o_out -> fp32 [BM, BN]. x0, w0, bias may be None.
    m_row, m_out = o_row < tokens, o_out < outs
    b_row = tl.load(row_scale + o_row * row_stride, mask=m_row, other=0.0)
    y = (sums.to(tl.float32) * FACTOR) * b_row[:, None]
    if out_scale is not None:
        y = y * tl.load(out_scale + o_out, mask=m_out, other=0.0)[None, :]
    if x0 is not None:
        b_x0 = tl.load(x0 + o_row, mask=m_row, other=0.0).to(tl.float32)
        b_w0 = tl.load(w0 + o_out, mask=m_out, other=0.0).to(tl.float32)
        y += b_x0[:, None] * b_w0[None, :]
    if bias is not None:
        y += tl.load(bias + o_out, mask=m_out, other=0.0).to(tl.float32)[None, :]
    return y
