"""W8A8 in Triton: int8 x int8 -> int32 on tensor cores, tiles by TMA, the epilogue in registers.

Programs walk over output tiles in groups of GROUP rows of tiles, so that what runs at one time
shares its tiles in L2. Both operands have `in` as their contiguous axis, as Hopper's int8 WGMMA
wants them.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from duotone.weights.kernels.triton_epilogue import epilogue
from duotone.weights.packed_weight import PackedWeight

# TMA wants rows that start at multiples of 16 bytes.
TMA_BYTES = 16


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes [tokens, outs, ins], tiles per group, warps, stages; programs per SM or 0: all."""

    tokens: int
    outs: int
    ins: int
    group: int = 8
    warps: int = 8
    stages: int = 4
    per_sm: int = 1
    flatten: bool = False


@triton.jit
def gemm_kernel(
    x,
    w,
    y,
    row_scale,
    out_scale,
    x0,
    w0,
    bias,
    tokens,
    outs,
    ins,
    y_stride,
    row_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    FACTOR: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(tokens, BM), tl.cdiv(outs, BN)
    for i_tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN
    ):
        in_group = GROUP * tiles_n
        first = i_tile // in_group * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        i_m = first + i_tile % in_group % size
        i_n = i_tile % in_group // size
        sums = tl.zeros([BM, BN], tl.int32)
        for k in range(0, ins, BK):
            b_x = x.load([i_m * BM, k])
            b_w = w.load([i_n * BN, k])
            sums = tl.dot(b_x, b_w.T, sums, out_dtype=tl.int32)
        o_row = i_m * BM + tl.arange(0, BM)
        o_out = i_n * BN + tl.arange(0, BN)
        b_y = epilogue(
            sums, o_row, o_out, tokens, outs, row_scale, row_stride, out_scale, x0, w0, bias, FACTOR
        )
        p_y = y + o_row.to(tl.int64)[:, None] * y_stride + o_out[None, :]
        m_y = (o_row < tokens)[:, None] & (o_out < outs)[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


def gemm_w8a8(
    x_q: Tensor,
    row_scale: Tensor,
    codes: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: GemmConfig,
    out: Tensor | None = None,
) -> Tensor:
    """Launch: int8 x_q [tokens, in] and codes [out, in], both contiguous, in % 16 == 0.

    weight: where scales and split column come from. codes: its own, or, of a weight of 4 bits, its
    codes times 16.
    """
    tokens, ins = x_q.shape
    outs = len(codes)
    y = torch.empty(tokens, outs, dtype=dtype, device=x_q.device) if out is None else out
    tiles = triton.cdiv(tokens, config.tokens) * triton.cdiv(outs, config.outs)
    programs = tiles
    if config.per_sm and x_q.is_cuda:
        sms = torch.cuda.get_device_properties(x_q.device).multi_processor_count
        programs = min(tiles, sms * config.per_sm)
    gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(x_q, [config.tokens, config.ins]),
        TensorDescriptor.from_tensor(codes, [config.outs, config.ins]),
        y,
        row_scale,
        weight.scale,
        x0,
        weight.w0,
        bias,
        tokens,
        outs,
        ins,
        y.stride(0),
        0 if row_scale.numel() == 1 else 1,
        BM=config.tokens,
        BN=config.outs,
        BK=config.ins,
        GROUP=config.group,
        FLATTEN=config.flatten,
        FACTOR=1.0 if weight.bits == 8 else 0.0625,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )
    return y
