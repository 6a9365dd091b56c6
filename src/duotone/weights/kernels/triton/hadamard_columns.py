"""The base's part of an online Hadamard alone: of few rows, in many small programs.

Sylvester's part is launched first and leaves fp32. The base's table is read before the wait.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.hadamard_table import TILE, base_table
from duotone.weights.kernels.triton.hadamard_base import store_result
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton.sylvester import dot_in_parts
from duotone.weights.kernels.triton.unpack import ASM


@dataclass(frozen=True)
class ColumnsConfig:
    """Columns and warps of a program, launched after Sylvester's part."""

    columns: int = 16
    warps: int = 4


@triton.jit
def columns_kernel(
    x,
    base,
    scale,
    y,
    x0,
    blocks,
    scale_stride,
    norm,
    M: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # W columns of a tile of T rows of a unit, whose columns are transformed already
    start_next(OVERLAP)
    o_t, o_k = tl.program_id(1) * T + tl.arange(0, T), tl.arange(0, K)
    b_h = tl.load(base + o_t[:, None] * K + o_k[None, :])
    wait_for_previous(OVERLAP)
    i_unit, o_p = tl.program_id(0), tl.program_id(2) * W + tl.arange(0, W)
    i_row, i_first = (i_unit // blocks).to(tl.int64), i_unit % blocks * (M * P)
    x += i_unit.to(tl.int64) * (M * P)
    m_x = (o_k < M)[:, None] & (o_p < P)[None, :]
    b_x = tl.load(x + o_k[:, None] * P + o_p[None, :], mask=m_x, other=0.0)
    b_scale = 1.0 if scale is None else tl.load(scale + i_row * scale_stride)
    b_y = dot_in_parts(b_x, b_h, PARTS, True, ASM) * (norm / b_scale)
    first = i_first + tl.program_id(1) * (T * P) + tl.program_id(2) * W
    o = tl.arange(0, T)[:, None] * P + tl.arange(0, W)[None, :]
    m = (o_t < M)[:, None] & (o_p < P)[None, :]
    store_result(b_y, y, x0, i_row, first, o, blocks * (M * P), m, b_scale, scale is not None)


def base_columns(
    x: Tensor,
    y: Tensor,
    x0: Tensor | None,
    blocks: int,
    base: Tensor,
    rows: int,
    p: int,
    norm: float,
    scale: Tensor | None,
    parts: int,
    config: ColumnsConfig,
) -> None:
    """Launch of the base's part alone: x fp32 [tokens, blocks * rows * p], contiguous.

    parts: of 8 bits each, that x is rounded to.
    """
    table = base_table(base, rows, torch.bfloat16, x.device)
    overlap = overlaps(x.device)
    grid = len(x) * blocks, triton.cdiv(rows, TILE), triton.cdiv(p, config.columns)
    columns_kernel[grid](
        x,
        table,
        scale,
        y,
        x0,
        blocks,
        0 if scale is None or scale.numel() == 1 else 1,
        norm,
        M=rows,
        K=len(table),
        T=TILE,
        P=p,
        W=config.columns,
        PARTS=parts,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=config.warps,
    )
