"""The online Hadamard with a base matrix H_m on tensor cores, to codes or dense.

A unit, one block of m * p channels of a row, is a matrix X [m, p] and becomes H_m X H_p. Powers of
two above 128 are folded into the base, H_m (x) H_(p / 128), so that p <= 128. The base is a table
on the device, padded with zeros, so that nothing about it needs masks.

Matrices of +-1 are exact in 16 bit, and sums are fp32. What lies between the two products is
rounded: to fp16 in units of the code, 11 bits, or to a sum of bf16 parts, 8 bits each.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.availability import multiprocessors
from duotone.weights.kernels.hadamard_table import TILE, base_table
from duotone.weights.kernels.triton_overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton_rows import rounded_codes
from duotone.weights.kernels.triton_sylvester import dot, dot_in_parts, load_rows, sylvester
from duotone.weights.kernels.triton_unpack import ASM


@dataclass(frozen=True)
class BaseConfig:
    """One launch: warps; stages of the base's tiles in flight; programs per multiprocessor."""

    warps: int = 4
    stages: int = 1
    per_sm: int = 3


@triton.jit
def _load_tile(
    x,
    up,
    first,
    left,
    T: tl.constexpr,
    M: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    # rows first ... first + T of the unit [M, P] at x, [T, B]; left: channels from there on
    o_m, o_p = first + tl.arange(0, T), tl.arange(0, B)
    o = o_m[:, None] * P + o_p[None, :]
    m = (o_m < M)[:, None] & (o_p < P)[None, :]
    if PADDED:
        # channels that are not left are zeros that nobody stored
        m = m & (o < left)
    return load_rows(x, up, o, m, ACTIVATION, o)


@triton.jit
def _base_product(base, b_x, b_y, o_t, chunk, T: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    # adds what rows chunk * T ... of the unit give
    o_k = chunk * T + tl.arange(0, T)
    return dot(tl.load(base + o_t[:, None] * K + o_k[None, :]), b_x, b_y, ASM)


@triton.jit
def store_result(b_y, y, x0, i_row, first, o, length, m, b_scale, CODES: tl.constexpr):
    # b_y: of a row of `length` channels those at first + o, divided by b_scale
    o += first
    if x0 is not None:
        # channel 0 of a row stays out of the codes
        is_0 = o == 0
        if first == 0:
            b_0 = tl.sum(tl.sum(tl.where(is_0, b_y, 0.0), 1), 0)
            tl.store(x0 + i_row, b_0 * b_scale)
        b_y = tl.where(is_0, 0.0, b_y)
    p_y = y + i_row * length + o
    if CODES:
        tl.store(p_y, rounded_codes(b_y), mask=m)
    else:
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def _halves(b_y, H: tl.constexpr):
    # columns [.., 2, H / 2] -> sum and difference of the two, [T, H] each
    T: tl.constexpr = b_y.shape[0]
    b_y = tl.permute(tl.reshape(b_y, [T, 2, 2, H // 2]), [0, 1, 3, 2])
    first, second = tl.split(tl.reshape(b_y, [T, H, 2]))
    return first + second, first - second


@triton.jit
def _second_product(b_y, h_p, CODES: tl.constexpr, ASM: tl.constexpr):
    if CODES:
        # beyond that range all codes of these sums are at their ends anyway
        b_y = tl.minimum(tl.maximum(b_y, -60000.0), 60000.0).to(tl.float16)
        b_y = dot(b_y, h_p, tl.zeros([b_y.shape[0], h_p.shape[1]], tl.float32), ASM)
    else:
        b_y = dot_in_parts(b_y, h_p, 2, False, ASM)
    return b_y


@triton.jit
def base_kernel(
    x,
    up,
    base,
    scale,
    y,
    x0,
    units,
    blocks,
    columns,
    x_stride,
    up_stride,
    scale_stride,
    norm,
    M: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    # of 128 columns one factor of 2 is a sum and a difference, which need no tensor core
    CODES: tl.constexpr = scale is not None
    H: tl.constexpr = min(B, 64)
    h_p = sylvester(H, min(P, H)).to(tl.float16 if CODES else tl.bfloat16)
    o_h = tl.arange(0, H)
    if B == 2 * H:
        o_h += o_h // (H // 2) * (H // 2)
    for i_unit in tl.range(tl.program_id(0), units, tl.num_programs(0), num_stages=1):
        i_row, i_first = (i_unit // blocks).to(tl.int64), i_unit % blocks * (M * P)
        left, x_unit, up_unit = columns - i_first, x + i_row * x_stride + i_first, up
        if up is not None:
            up_unit = up + i_row * up_stride + i_first
        b_x0 = _load_tile(x_unit, up_unit, 0, left, T, M, B, P, PADDED, ACTIVATION)
        if TILES > 1:
            b_x1 = _load_tile(x_unit, up_unit, T, left, T, M, B, P, PADDED, ACTIVATION)
        if TILES > 2:
            b_x2 = _load_tile(x_unit, up_unit, 2 * T, left, T, M, B, P, PADDED, ACTIVATION)
        if TILES > 3:
            b_x3 = _load_tile(x_unit, up_unit, 3 * T, left, T, M, B, P, PADDED, ACTIVATION)
        b_scale = 1.0 if scale is None else tl.load(scale + i_row * scale_stride)
        for i_tile in tl.range(0, TILES, num_stages=STAGES):
            o_t = i_tile * T + tl.arange(0, T)
            b_0 = tl.zeros([T, B], tl.float32)
            b_y = _base_product(base, b_x0, b_0, o_t, 0, T, K, ASM)
            if TILES > 1:
                b_y = _base_product(base, b_x1, b_y, o_t, 1, T, K, ASM)
            if TILES > 2:
                b_y = _base_product(base, b_x2, b_y, o_t, 2, T, K, ASM)
            if TILES > 3:
                b_y = _base_product(base, b_x3, b_y, o_t, 3, T, K, ASM)
            b_y *= norm / b_scale
            length = blocks * (M * P)
            m_t = (o_t < M)[:, None] & (o_h < P)[None, :]
            first = i_first + i_tile * (T * P)
            o = tl.arange(0, T)[:, None] * P + o_h[None, :]
            if B == 2 * H:
                b_y, b_z = _halves(b_y, H)
                b_z = _second_product(b_z, h_p, CODES, ASM)
                store_result(b_z, y, None, i_row, first, o + H // 2, length, m_t, b_scale, CODES)
            b_y = _second_product(b_y, h_p, CODES, ASM)
            store_result(b_y, y, x0, i_row, first, o, length, m_t, b_scale, CODES)


def base_units(
    x: Tensor,
    y: Tensor,
    x0: Tensor | None,
    blocks: int,
    base: Tensor,
    rows: int,
    p: int,
    norm: float,
    scale: Tensor | None,
    config: BaseConfig,
    *,
    up: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Launch of x [tokens, up to blocks * rows * p], 16 bit, `rows` and p as `folded` gives them.

    y [tokens, blocks * rows * p]: codes with a scale, else in a floating type.
    """
    columns, units = x.shape[1], len(x) * blocks
    table = base_table(base, rows, x.dtype)
    overlap = overlaps(x.device)
    base_kernel[(min(units, config.per_sm * multiprocessors(x.device)),)](
        x,
        up,
        table,
        scale,
        y,
        x0,
        units,
        blocks,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        0 if scale is None or scale.numel() == 1 else 1,
        norm,
        M=rows,
        K=table.shape[1],
        TILES=len(table) // TILE,
        T=TILE,
        B=max(16, p),
        P=p,
        PADDED=columns < y.shape[1],
        ACTIVATION=activation,
        STAGES=config.stages,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=config.warps,
    )
