"""Sylvester's Hadamard transform of blocks of p channels in Triton, p a power of two.

Alone or between an activation function and quantization. H_p = H_a (x) H_b is two small products
with fp32 sums: the first of unrounded 16-bit inputs, the second in tf32. Matrices of +-1 are exact,
so each product rounds its input once at most, to 11 bits. fp32 inputs are sums of three bf16 parts.
"""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton.activation import activated
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton.rows import to_codes
from duotone.weights.kernels.triton.unpack import ASM

# Below, programs are too few for the device, and each takes as little as it can.
_FEW_UNITS = 4096


@triton.jit
def sylvester(N: tl.constexpr, USED: tl.constexpr):
    # [N, N] with the Sylvester matrix of size USED in a corner, zeros elsewhere:
    # (-1)^popcount(i & j)
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    parity = i & j
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    sign = (1 - 2 * (parity & 1)).to(tl.float32)
    return tl.where((i < USED) & (j < USED), sign, 0.0)


@triton.jit
def dot(a, b, acc, ASM: tl.constexpr):
    if not ASM:
        # the interpreter multiplies bfloat16's bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def dot_in_parts(b_x, h, PARTS: tl.constexpr, LEFT: tl.constexpr, ASM: tl.constexpr):
    # b_x h, or h b_x (LEFT), of fp32 b_x [m, n] as a sum of bf16 and bf16 h
    b_y = tl.zeros([h.shape[0] if LEFT else b_x.shape[0], b_x.shape[1]], tl.float32)
    for _ in tl.static_range(PARTS):
        part = b_x.to(tl.bfloat16)
        b_y = dot(h, part, b_y, ASM) if LEFT else dot(part, h, b_y, ASM)
        b_x -= part.to(tl.float32)
    return b_y


@triton.jit
def _times(b_x, h, ASM: tl.constexpr):
    # fp32 b_x rounded to nothing less, 16 bit as it is
    if b_x.dtype == tl.float32:
        b_y = dot_in_parts(b_x, h.to(tl.bfloat16), 3, False, ASM)
    else:
        b_0 = tl.zeros([b_x.shape[0], h.shape[1]], tl.float32)
        b_y = dot(b_x, h.to(b_x.dtype), b_0, ASM)
    return b_y


@triton.jit
def rows_transformed(
    b_x, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr, P: tl.constexpr, ASM: tl.constexpr
):
    # [R, A * B] in its own dtype -> b_x (H_A (x) H_B), fp32; with A == 1, B is P filled up to 16
    b_y = _times(tl.reshape(b_x, [R * A, B]), sylvester(B, P if A == 1 else B), ASM)
    if A > 1:
        b_y = tl.reshape(tl.permute(tl.reshape(b_y, [R, A, B]), [0, 2, 1]), [R * B, A])
        if b_x.dtype == tl.float32:
            b_y = _times(b_y, sylvester(A, A), ASM)
        else:
            b_y = tl.dot(b_y, sylvester(A, A))
        b_y = tl.reshape(tl.permute(tl.reshape(b_y, [R, B, A]), [0, 2, 1]), [R, A * B])
    return b_y


@triton.jit
def load_rows(x, up, o, m, ACTIVATION: tl.constexpr, o_up):
    # the input of the transform
    b_x, b_up = load_both(x, up, o, m, o_up)
    return gated_rows(b_x, b_up, up is not None, ACTIVATION)


@triton.jit
def load_both(x, up, o, m, o_up):
    # without `up`, x stands for it
    b_x = tl.load(x + o, mask=m, other=0.0)
    b_up = b_x
    if up is not None:
        b_up = tl.load(up + o_up, mask=m, other=0.0)
    return b_x, b_up


@triton.jit
def gated_rows(b_x, b_up, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    # rounded to the dtype of x as the model rounds it
    if ACTIVATION is not None or GATED:
        b_y = activated(b_x.to(tl.float32), ACTIVATION)
        if GATED:
            b_y *= b_up.to(tl.float32)
        b_x = b_y.to(b_x.dtype)
    return b_x


@triton.jit
def sylvester_kernel(
    x,
    up,
    scale,
    y,
    x0,
    tokens,
    blocks,
    columns,
    x_stride,
    up_stride,
    scale_stride,
    norm,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # R units (a block of a row each) at once
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    o_p = tl.arange(0, A * B)
    o_unit = tl.program_id(0) * R + tl.arange(0, R)
    o_row, o_first = (o_unit // blocks).to(tl.int64), o_unit % blocks * P
    m_unit = o_unit < tokens * blocks
    m = m_unit[:, None] & (o_p < P)[None, :]
    m_x = m
    if PADDED:
        # channels from `columns` on are zeros that are not stored
        m_x = m_x & (o_first[:, None] + o_p[None, :] < columns)
    o = (o_row * x_stride + o_first)[:, None] + o_p[None, :]
    o_up = (o_row * up_stride + o_first)[:, None] + o_p[None, :]
    b_x = load_rows(x, up, o, m_x, ACTIVATION, o_up)
    b_y = rows_transformed(b_x, R, A, B, P, ASM) * norm
    o_y = (o_row * (blocks * P) + o_first)[:, None] + o_p[None, :]
    if x0 is not None:
        # channel 0 of a row stays out of the codes
        is_0 = (o_first == 0)[:, None] & (o_p == 0)[None, :]
        tl.store(x0 + o_row[:, None] + tl.zeros_like(o_p)[None, :], b_y, mask=m & is_0)
        b_y = tl.where(is_0, 0.0, b_y)
    if scale is not None:
        b_scale = tl.load(scale + o_row * scale_stride, mask=m_unit, other=1.0)
        tl.store(y + o_y, to_codes(b_y, b_scale[:, None]), mask=m)
    else:
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m)


def sylvester_rows(
    x: Tensor,
    y: Tensor,
    blocks: int,
    p: int,
    norm: float,
    *,
    scale: Tensor | None = None,
    up: Tensor | None = None,
    activation: str | None = None,
    x0: Tensor | None = None,
) -> None:
    """Launch: y [tokens, blocks * p] = norm * transform of x [tokens, up to blocks * p].

    Rows of x and up may be strided. y: int8 codes with a scale, else any floating type. x0: fp32
    [tokens] for channel 0, or None.
    """
    tokens, columns = x.shape
    a, b = factors(p)
    units = tokens * blocks
    rows = _units_at_once(units, a, b)
    if x.dtype == torch.float32 and a == 1:
        # a warp group's product reads H_b, for all parts of x, from shared memory
        rows = 64
    overlap = overlaps(x.device)
    sylvester_kernel[(triton.cdiv(units, rows),)](
        x,
        up,
        scale,
        y,
        x0,
        tokens,
        blocks,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        0 if scale is None or scale.numel() == 1 else 1,
        norm,
        R=rows,
        A=a,
        B=b,
        P=p,
        PADDED=columns < blocks * p,
        ACTIVATION=activation,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4 if rows * a * b * x.element_size() <= 16384 else 8,
    )


def _units_at_once(units: int, a: int, b: int) -> int:
    """Rows of a tile: a product has 16 at least, of which a and b make up some."""
    least = 1 if a > 1 else 16
    return least if units < _FEW_UNITS else max(least, min(32, 4096 // (a * b)))


def factors(p: int) -> tuple[int, int]:
    """(a, b) with H_p = H_a (x) H_b, both small; a = 1: one product, b at least 16."""
    if p <= 128:
        return 1, max(16, p)
    a = 1 << (p.bit_length() - 1) // 2
    return a, p // a
