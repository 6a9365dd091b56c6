"""Activations to int8 in Triton, fused with the operations before: norms, gates, activations.

Static scales are known beforehand, so without a norm a row may be cut into pieces. A norm and a
dynamic scale (the row's own maximum) need a whole row in one program, which reads a long row twice.
"""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton.activation import activated
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous

# Columns of a program: static codes; a pass of dynamic ones.
_PIECE, _LONG_PIECE = 2048, 4096
# Longer rows outgrow the registers of a program.
_LONG = 8192


@triton.jit
def rounded_codes(scaled):
    return _rounded(tl.minimum(tl.maximum(scaled, -127.0), 127.0))


@triton.jit
def _rounded(scaled):
    # adding 1.5 * 2^23 rounds half to even; the lowest byte of the sum is the code
    return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_codes(values, scale):
    return divided_codes(values, scale, tl.div_rn(1.0, scale))


@triton.jit
def divided_codes(values, scale, inverse):
    # values / scale, correctly rounded: the product with the reciprocal, fixed by its remainder
    # (Markstein). A division each has branches; that of a zero takes the slow one.
    most = scale * 127.0
    values = tl.minimum(tl.maximum(values, -most), most)
    near = values * inverse
    return _rounded(tl.fma(tl.fma(-near, scale, values), inverse, near))


@triton.jit
def rows_kernel(
    x,
    up,
    weight,
    bias,
    scale,
    codes,
    dense,
    found,
    columns,
    x_stride,
    up_stride,
    eps,
    SCALES: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # all loads come first: after the reduction each would wait for memory once more
    start_next(OVERLAP)
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o_column < columns
    if weight is not None:
        b_weight = tl.load(weight + o_column, mask=m, other=0.0)
    if bias is not None:
        b_bias = tl.load(bias + o_column, mask=m, other=0.0)
    wait_for_previous(OVERLAP)
    b_x = tl.load(x + i_row * x_stride + o_column, mask=m, other=0.0)
    if up is not None:
        b_up = tl.load(up + i_row * up_stride + o_column, mask=m, other=0.0)
    if scale is not None:
        b_scale = tl.load(scale + i_row if SCALES else scale)
        b_inverse = tl.div_rn(1.0, b_scale)
    b_x = b_x.to(tl.float32)
    if NORM == "layer":
        b_x = tl.where(m, b_x - tl.sum(b_x, 0) / columns, 0.0)
    if NORM is not None:
        b_x = b_x * (1.0 / tl.sqrt_rn(tl.sum(b_x * b_x, 0) / columns + eps))
        if weight is not None:
            b_x = b_x * b_weight.to(tl.float32)
        if bias is not None:
            b_x = b_x + b_bias.to(tl.float32)
    b_x = activated(b_x, ACTIVATION)
    if up is not None:
        b_x *= b_up.to(tl.float32)
    p_out = i_row * columns + o_column
    if dense is not None:
        tl.store(dense + p_out, b_x.to(dense.dtype.element_ty), mask=m)
    if codes is not None:
        if scale is None:
            most = tl.max(tl.abs(b_x), 0)
            b_scale = tl.where(most > 0, tl.div_rn(most, 127.0), 1.0)
            b_inverse = tl.div_rn(1.0, b_scale)
            tl.store(found + i_row, b_scale)
        tl.store(codes + p_out, divided_codes(b_x, b_scale, b_inverse), mask=m)


@triton.jit
def gated(x, up, o_column, m, ACTIVATION: tl.constexpr):
    # activation(x) * up of one row, fp32
    b_x = activated(tl.load(x + o_column, mask=m, other=0.0).to(tl.float32), ACTIVATION)
    if up is not None:
        b_x *= tl.load(up + o_column, mask=m, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def long_rows_kernel(
    x,
    up,
    codes,
    found,
    columns,
    x_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # dynamic scales: a pass for the maximum, then one for the codes, which reads from caches
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    i_row = tl.program_id(0).to(tl.int64)
    x += i_row * x_stride
    if up is not None:
        up += i_row * up_stride
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        o_column = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.abs(gated(x, up, o_column, o_column < columns, ACTIVATION)))
    largest = tl.max(most, 0)
    b_scale = tl.where(largest > 0, tl.div_rn(largest, 127.0), 1.0)
    tl.store(found + i_row, b_scale)
    for first in range(0, columns, BLOCK):
        o_column = first + tl.arange(0, BLOCK)
        m = o_column < columns
        b_x = gated(x, up, o_column, m, ACTIVATION)
        tl.store(codes + i_row * columns + o_column, to_codes(b_x, b_scale), mask=m)


def long_rows_quantize(
    x: Tensor, up: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Launch for rows longer than one program should hold: (codes, scale per row)."""
    tokens, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    found = torch.empty(tokens, dtype=torch.float32, device=x.device)
    overlap = overlaps(x.device)
    long_rows_kernel[(tokens,)](
        x,
        up,
        codes,
        found,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        ACTIVATION=activation,
        BLOCK=_LONG_PIECE,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=8,
    )
    return codes, found


def rows_quantize(
    x: Tensor,
    scale: Tensor | None,
    *,
    up: Tensor | None = None,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    quantize: bool = True,
    dense: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Launch. x, up: [tokens, channels], rows may be strided; all else contiguous.

    Returns (codes, scale per row if it was found here, dense result if wanted).
    """
    tokens, columns = x.shape
    dynamic = quantize and scale is None
    if dynamic and columns > _LONG and norm is None and not dense:
        return *long_rows_quantize(x, up, activation), None
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device) if quantize else None
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dense else None
    found = torch.empty(tokens, dtype=torch.float32, device=x.device) if dynamic else None
    whole = norm is not None or dynamic
    block = triton.next_power_of_2(columns)
    block = block if whole else min(block, _PIECE)
    overlap = overlaps(x.device)
    rows_kernel[(tokens, triton.cdiv(columns, block))](
        x,
        up,
        weight,
        bias,
        scale,
        codes,
        made,
        found,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        eps,
        SCALES=scale is not None and scale.numel() > 1,
        NORM=norm,
        ACTIVATION=activation,
        BLOCK=block,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=_warps(block),
    )
    return codes, found, made


def _warps(block: int) -> int:
    """Measured at 70 to 477 rows: of 6,144 columns, 8 warps take a tenth less time than 16."""
    return 16 if block > _LONG else max(1, min(8, block // 512))
