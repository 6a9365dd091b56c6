"""The online Hadamard in Triton, alone or between an activation function and quantization.

A block of m * p channels is a matrix [m, p]: rows are transformed by H_p = H_a (x) H_b as two small
products, columns by H_m as a third. The first product takes 16-bit inputs as they are, the others
tf32, both with fp32 sums: matrices of +-1 are exact, so each rounds its input once, to 11 bits.
"""

# ruff: noqa: D103
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton_activation import activated
from duotone.weights.kernels.triton_overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton_rows import to_codes

# Below, programs are too few for the device, and each takes as little as it can.
_FEW_UNITS = 4096
# Programs that share the columns of few large units: two on each of 132 SMs, 16 columns at least.
_SLICED_PROGRAMS, _SLICE = 264, 16


@triton.jit
def sylvester(N: tl.constexpr, USED: tl.constexpr, first, W: tl.constexpr):
    # [N, W], from column `first` on, of the Sylvester matrix of size USED in a corner, zeros
    # elsewhere: (-1)^popcount(i & j)
    i, j = tl.arange(0, N)[:, None], first + tl.arange(0, W)[None, :]
    parity = i & j
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    sign = (1 - 2 * (parity & 1)).to(tl.float32)
    return tl.where((i < USED) & (j < USED), sign, 0.0)


@triton.jit
def rows_transformed(
    b_x, first, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr, P: tl.constexpr, W: tl.constexpr
):
    # [R, A * B] in its own dtype -> b_x (H_A (x) H_B), fp32, of it the columns a * B + first + w:
    # [R, A * W]; with A == 1, B is P filled up to 16
    USED: tl.constexpr = P if A == 1 else B
    precision: tl.constexpr = "ieee" if b_x.dtype == tl.float32 else "tf32"
    h_b = sylvester(B, USED, first, W).to(b_x.dtype)
    b_y = tl.dot(tl.reshape(b_x, [R * A, B]), h_b, input_precision=precision)
    if A > 1:
        b_y = tl.permute(tl.reshape(b_y, [R, A, W]), [0, 2, 1])
        b_y = tl.dot(tl.reshape(b_y, [R * W, A]), sylvester(A, A, 0, A), input_precision=precision)
        b_y = tl.reshape(tl.permute(tl.reshape(b_y, [R, W, A]), [0, 2, 1]), [R, A * W])
    return b_y


@triton.jit
def load_rows(x, up, o, m, ACTIVATION: tl.constexpr, o_up):
    # what is to be transformed, rounded to the dtype of x as the model rounds it
    b_x = tl.load(x + o, mask=m, other=0.0)
    if ACTIVATION is not None or up is not None:
        b_y = activated(b_x.to(tl.float32), ACTIVATION)
        if up is not None:
            b_y *= tl.load(up + o_up, mask=m, other=0.0).to(tl.float32)
        b_x = b_y.to(b_x.dtype)
    return b_x


@triton.jit
def hadamard_kernel(
    x,
    up,
    base,
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
    M: tl.constexpr,
    MP: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # W: of the B columns of H_B, those of one program; below B with M > 1 alone
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    o_p = tl.arange(0, A * B)
    m_p = (o_p < P)[None, :]
    # of what is stored: of every H_B its columns from `first_w` on
    first_w, o_q = tl.program_id(1) * W, tl.arange(0, A * W)
    o_q = o_q // W * B + first_w + o_q % W
    m_q = (o_q < P)[None, :]
    if M == 1:
        # R units (a block of a row each) at once
        o_unit = tl.program_id(0) * R + tl.arange(0, R)
        o_row, o_first = (o_unit // blocks).to(tl.int64), o_unit % blocks * P
        m_unit = o_unit < tokens * blocks
        m_x = m_unit[:, None] & m_p
        if PADDED:
            # channels from `columns` on are zeros that nobody stored
            m_x = m_x & (o_first[:, None] + o_p[None, :] < columns)
        o = (o_row * x_stride + o_first)[:, None] + o_p[None, :]
        o_up = (o_row * up_stride + o_first)[:, None] + o_p[None, :]
        b_x = load_rows(x, up, o, m_x, ACTIVATION, o_up)
        b_y = rows_transformed(b_x, first_w, R, A, B, P, W)
    else:
        # one unit: its matrix [M, P] in slices of R rows, each times R columns of the base
        i_unit = tl.program_id(0)
        i_row, i_first = (i_unit // blocks).to(tl.int64), i_unit % blocks * (M * P)
        o_m = tl.arange(0, MP)
        b_y = tl.zeros([MP, A * W], tl.float32)
        precision: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
        for first in range(0, M, R):
            o_r = first + tl.arange(0, R)
            m_r = (o_r < M)[:, None] & m_p
            o = o_r[:, None] * P + o_p[None, :]
            if PADDED:
                m_r = m_r & (i_first + o < columns)
            o_x, o_up = i_row * x_stride + i_first + o, i_row * up_stride + i_first + o
            b_x = load_rows(x, up, o_x, m_r, ACTIVATION, o_up)
            b_x = rows_transformed(b_x, first_w, R, A, B, P, W)
            m_h = (o_m < M)[:, None] & (o_r < M)[None, :]
            b_h = tl.load(base + o_m[:, None] * M + o_r[None, :], mask=m_h, other=0.0)
            b_y = tl.dot(b_h.to(tl.float32), b_x, b_y, input_precision=precision)
        o_row = i_row + tl.zeros([MP], tl.int64)
        o_first = i_first + o_m * P
        m_unit = o_m < M
    m = m_unit[:, None] & m_q
    b_y = b_y * norm
    o_y = (o_row * (blocks * M * P) + o_first)[:, None] + o_q[None, :]
    if x0 is not None:
        # channel 0 of a row stays out of the codes
        is_0 = (o_first == 0)[:, None] & (o_q == 0)[None, :]
        tl.store(x0 + o_row[:, None] + tl.zeros_like(o_q)[None, :], b_y, mask=m & is_0)
        b_y = tl.where(is_0, 0.0, b_y)
    if scale is not None:
        b_scale = tl.load(scale + o_row * scale_stride, mask=m_unit, other=1.0)
        tl.store(y + o_y, to_codes(b_y, b_scale[:, None]), mask=m)
    else:
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m)


def hadamard_rows(
    x: Tensor,
    blocks: int,
    base: Tensor | None,
    p: int,
    *,
    scale: Tensor | None = None,
    up: Tensor | None = None,
    activation: str | None = None,
    split: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch. x, up: [tokens, up to blocks * m * p], rows may be strided. base: [m, m] or None.

    Returns (int8 codes with a scale, else the transform in the dtype of x; channel 0 if split).
    """
    (tokens, columns), m = x.shape, 1 if base is None else len(base)
    kind, padded = x.dtype if scale is None else torch.int8, blocks * m * p
    y = torch.empty(tokens, padded, dtype=kind, device=x.device)
    x0 = torch.empty(tokens, dtype=torch.float32, device=x.device) if split else None
    a, b = factors(p)
    mp = max(16, triton.next_power_of_2(m))
    units = tokens * blocks
    rows = _units_at_once(units, a, b) if m == 1 else min(32, mp)
    base = None if base is None else base.contiguous()
    slices = 1 if m == 1 else _slices(units, b)
    tile = (rows if m == 1 else mp) * a * b // slices
    overlap = overlaps(x.device)
    hadamard_kernel[(triton.cdiv(units, rows) if m == 1 else units, slices)](
        x,
        up,
        base,
        scale,
        y,
        x0,
        tokens,
        blocks,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        0 if scale is None or scale.numel() == 1 else 1,
        1 / math.sqrt(m * p),
        M=m,
        MP=mp,
        R=rows,
        A=a,
        B=b,
        P=p,
        W=b // slices,
        PADDED=columns < padded,
        ACTIVATION=activation,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4 if tile <= 8192 else 8,
    )
    return y, x0


def _units_at_once(units: int, a: int, b: int) -> int:
    """Rows of a tile: a product has 16 at least, of which a and b make up some."""
    least = 1 if a > 1 else 16
    return least if units < _FEW_UNITS else max(least, min(32, 4096 // (a * b)))


def _slices(units: int, b: int) -> int:
    """Programs per unit with a base: each reads all of it and stores a share of its columns."""
    slices = b // _SLICE
    while slices > 1 and units * slices > _SLICED_PROGRAMS:
        slices //= 2
    return slices


def factors(p: int) -> tuple[int, int]:
    """(a, b) with H_p = H_a (x) H_b, both small; a = 1: one product, b at least 16."""
    if p <= 128:
        return 1, max(16, p)
    a = 1 << (p.bit_length() - 1) // 2
    return a, p // a
