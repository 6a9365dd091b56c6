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

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.hadamard_table import ONE, TILE, base_table
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton.rows import rounded_codes
from duotone.weights.kernels.triton.sylvester import dot, dot_in_parts, gated_rows, load_both
from duotone.weights.kernels.triton.unpack import ASM


@dataclass(frozen=True)
class BaseConfig:
    """A program per unit: its warps, 16 rows of a tile each; registers of a thread.

    registers: at most, so that more programs fit on a multiprocessor; None for no limit.
    """

    warps: int = 4
    registers: int | None = None


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
):
    # rows first ... first + T of the unit [M, P] at x and up, [T, B]; left: channels from there on
    o_m, o_p = first + tl.arange(0, T), tl.arange(0, B)
    o = o_m[:, None] * P + o_p[None, :]
    m = (o_m < M)[:, None] & (o_p < P)[None, :]
    if PADDED:
        # channels beyond these are zeros that are not stored
        m = m & (o < left)
    return load_both(x, up, o, m, o)


@triton.jit
def _base_product(base, b_x, b_y, o_t, chunk, T: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    # adds the share of the unit's rows chunk * T ...
    o_k = chunk * T + tl.arange(0, T)
    return dot(tl.load(base + o_t[:, None] * K + o_k[None, :]), b_x, b_y, ASM)


@triton.jit
def store_result(b_y, y, x0, i_row, first, o, length, m, b_scale, CODES: tl.constexpr):
    # b_y: channels at first + o of a row of `length` channels, divided by b_scale
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
def _saturated(b_y, ASM: tl.constexpr):
    # fp32 -> fp16, at most its largest: codes of sums beyond are at their ends anyway
    if ASM:
        b_y = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [b_y],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        b_y = tl.minimum(tl.maximum(b_y, -65504.0), 65504.0).to(tl.float16)
    return b_y


@triton.jit
def _second_product(b_y, h_p, CODES: tl.constexpr, ASM: tl.constexpr):
    if CODES:
        b_y = dot(
            _saturated(b_y, ASM), h_p, tl.zeros([b_y.shape[0], h_p.shape[1]], tl.float32), ASM
        )
    else:
        b_y = dot_in_parts(b_y, h_p, 2, False, ASM)
    return b_y


@triton.jit
def base_kernel(
    x,
    up,
    base,
    power,
    scale,
    y,
    x0,
    blocks,
    columns,
    x_stride,
    up_stride,
    scale_stride,
    norm,
    M: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    # of 128 columns one factor of 2 is a sum and a difference, which need no tensor core
    CODES: tl.constexpr = scale is not None
    H: tl.constexpr = min(B, 64)
    o_h = tl.arange(0, H)
    o_power = o_h[:, None] * L + o_h[None, :]
    if B == 2 * H:
        o_h += o_h // (H // 2) * (H // 2)
    wait_for_previous(OVERLAP)
    i_unit = tl.program_id(0)
    i_row, i_first = (i_unit // blocks).to(tl.int64), i_unit % blocks * (M * P)
    left, x_unit, up_unit = columns - i_first, x + i_row * x_stride + i_first, up
    if up is not None:
        up_unit = up + i_row * up_stride + i_first
    b_scale = 1.0 if scale is None else tl.load(scale + i_row * scale_stride)
    GATED: tl.constexpr = up is not None
    b_x0, b_up0 = _load_tile(x_unit, up_unit, 0, left, T, M, B, P, PADDED)
    # not before: who stores it to shared memory waits for it
    h_p = tl.load(power + o_power)
    b_x0 = gated_rows(b_x0, b_up0, GATED, ACTIVATION)
    if TILES > 1:
        b_x1, b_up1 = _load_tile(x_unit, up_unit, T, left, T, M, B, P, PADDED)
        b_x1 = gated_rows(b_x1, b_up1, GATED, ACTIVATION)
    if TILES > 2:
        b_x2, b_up2 = _load_tile(x_unit, up_unit, 2 * T, left, T, M, B, P, PADDED)
        b_x2 = gated_rows(b_x2, b_up2, GATED, ACTIVATION)
    if TILES > 3:
        b_x3, b_up3 = _load_tile(x_unit, up_unit, 3 * T, left, T, M, B, P, PADDED)
        b_x3 = gated_rows(b_x3, b_up3, GATED, ACTIVATION)
    for i_tile in tl.range(0, TILES, num_stages=1):
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
    columns = x.shape[1]
    table = base_table(base, rows, x.dtype, x.device)
    tile = min(16 * config.warps, len(table))
    middle = torch.bfloat16 if scale is None else torch.float16
    power = base_table(ONE, min(p, TILE), middle, x.device)
    overlap = overlaps(x.device)
    base_kernel[(len(x) * blocks,)](
        x,
        up,
        table,
        power,
        scale,
        y,
        x0,
        blocks,
        columns,
        x.stride(0),
        0 if up is None else up.stride(0),
        0 if scale is None or scale.numel() == 1 else 1,
        norm,
        M=rows,
        K=len(table),
        L=len(power),
        TILES=triton.cdiv(rows, tile),
        T=tile,
        B=max(16, p),
        P=p,
        PADDED=columns < y.shape[1],
        ACTIVATION=activation,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=config.warps,
        maxnreg=config.registers,
    )
