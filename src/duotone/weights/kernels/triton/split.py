"""Few tokens: the weight is read once, unpacked in registers, its columns split over programs.

W4A8, W8A8 and W4A16 in one kernel. The weight is the first operand of the product: channels are the
rows of a tile. So few tokens fill a tensor core's short side, and the unpacked side may stay in
registers. Even and odd columns of 4-bit weights are multiplied separately, so no nibble moves. x is
read two values at a time and split the same way.

Splits write partial sums; the last split to arrive adds the sums in order, so the result does not
depend on the order of arrival. Integer sums are exact in any order. With groups of scales, each
group's integer sums are scaled, and fp32 is added up.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.scratch import scratch
from duotone.weights.kernels.triton.epilogue import epilogue, group_scale
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton.unpack import ASM, as_bfloat16, times_16
from duotone.weights.modules.packed_weight import PackedWeight


@dataclass(frozen=True)
class SplitConfig:
    """Tile sizes [outs, tokens, ins], splits of `in`, warps, stages."""

    outs: int
    tokens: int
    ins: int
    splits: int
    warps: int = 4
    stages: int = 4


@triton.jit
def _pair_of(pairs, FLOAT: tl.constexpr, ASM: tl.constexpr):
    # pairs of neighbours in one integer -> (even, odd)
    if FLOAT and not ASM:
        # the interpreter multiplies bfloat16's bits: fp32, whose upper half bfloat16 is
        even = (pairs << 16).to(tl.float32, bitcast=True)
        odd = (pairs & -65536).to(tl.float32, bitcast=True)
    elif FLOAT:
        even = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        even = pairs.to(tl.int8)
        odd = (pairs >> 8).to(tl.int8)
    return even, odd


@triton.jit
def _product(b_w, b_x, sums, BITS: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr):
    # [BN, BK bytes] x [BT, BK] -> sums + [BN, BT]
    if BITS == 8:
        sums = tl.dot(b_w, b_x.T, sums, out_dtype=tl.int32)
    else:
        even, odd = _pair_of(b_x, FLOAT, ASM)
        if FLOAT:
            low, high = as_bfloat16(b_w, ASM)
            sums = tl.dot(low, even.T, sums)
            sums = tl.dot(high, odd.T, sums)
        elif b_w.shape[1] < 32:
            # tensor cores take 32 int8 at least
            low, high = times_16(b_w, ASM)
            b_w, b_x = tl.interleave(low, high), tl.interleave(even, odd)
            sums = tl.dot(b_w, b_x.T, sums, out_dtype=tl.int32)
        else:
            low, high = times_16(b_w, ASM)
            sums = tl.dot(low, even.T, sums, out_dtype=tl.int32)
            sums = tl.dot(high, odd.T, sums, out_dtype=tl.int32)
    return sums


# one compilation for all numbers of tokens of a tile
@triton.jit(do_not_specialize=["tokens"])
def split_kernel(
    x,
    w,
    y,
    partial,
    counters,
    row_scale,
    out_scale,
    x0,
    w0,
    bias,
    tokens,
    outs,
    ins,
    x_stride,
    y_stride,
    row_stride,
    split_ins,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    SIZE: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # ins, split_ins, BK count elements of x and w as they are stored: bytes of packed weights. So
    # does SIZE, of a group of scales, a multiple of BK; None: one scale per channel.
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    i_n, i_split, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_out = i_n * BN + tl.arange(0, BN)
    o_row = i_t * BT + tl.arange(0, BT)
    o_in = tl.arange(0, BK)
    m_out, m_row = (o_out < outs)[:, None], (o_row < tokens)[:, None]
    p_w = w + o_out.to(tl.int64)[:, None] * ins
    p_x = x + o_row.to(tl.int64)[:, None] * x_stride
    product_type: tl.constexpr = tl.float32 if FLOAT else tl.int32
    sums = tl.zeros([BN, BT], product_type if SIZE is None else tl.float32)
    first = i_split * split_ins
    for k in range(first, tl.minimum(first + split_ins, ins), BK):
        m_in = (k + o_in < ins)[None, :]
        b_w = tl.load(p_w + (k + o_in)[None, :], mask=m_out & m_in, other=0)
        b_x = tl.load(p_x + (k + o_in)[None, :], mask=m_row & m_in, other=0)
        if SIZE is None:
            sums = _product(b_w, b_x, sums, BITS, FLOAT, ASM)
        else:
            b_s = group_scale(out_scale, o_out, k // SIZE, outs, ins // SIZE)
            part = _product(b_w, b_x, tl.zeros([BN, BT], product_type), BITS, FLOAT, ASM)
            sums += part.to(tl.float32) * b_s[:, None]
    mine = True
    sums = sums.T
    if SPLITS > 1:
        tile = i_t * tl.num_programs(0) + i_n
        p_tile = partial + tile.to(tl.int64) * (SPLITS * BN * BT)
        p_tile += tl.arange(0, BT)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(p_tile + i_split * (BN * BT), sums, mask=m_row)
        # all of this program's stores come before its arrival
        tl.debug_barrier()
        mine = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if mine:
            # in order, in whichever program; unrolled, so that all loads are in flight at one time
            sums = tl.load(p_tile, mask=m_row, other=0, cache_modifier=".cg")
            for other in range(1, SPLITS):
                p_other = p_tile + other * (BN * BT)
                sums += tl.load(p_other, mask=m_row, other=0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if mine:
        factor: tl.constexpr = 0.0625 if BITS == 4 and not FLOAT else 1.0
        b_y = epilogue(
            sums,
            o_row,
            o_out,
            tokens,
            outs,
            row_scale,
            row_stride,
            out_scale if SIZE is None else None,
            x0,
            w0,
            bias,
            factor,
        )
        p_y = y + o_row.to(tl.int64)[:, None] * y_stride + o_out[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_row & (o_out < outs)[None, :])


def split_linear(
    x: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: SplitConfig,
) -> Tensor:
    """Launch: x int8 or bfloat16 [tokens, in], contiguous, `in` even for 4 bits.

    With groups of scales config.ins divides their size.
    """
    tokens, outs, per = len(x), len(weight.codes), 8 // weight.bits
    ins, step = weight.codes.shape[1], config.ins // per
    size = None if weight.group_size is None else weight.group_size // per
    floating = x.is_floating_point()
    split_ins = triton.cdiv(triton.cdiv(ins, step), config.splits) * step
    splits = triton.cdiv(ins, split_ins)
    grid = (triton.cdiv(outs, config.outs), splits, triton.cdiv(tokens, config.tokens))
    y = torch.empty(tokens, outs, dtype=dtype, device=x.device)
    tiles = grid[0] * grid[2]
    partial = counters = None
    if splits > 1:
        count = tiles * splits * config.outs * config.tokens
        partial = scratch(x.device, "partial sums", count, torch.int32)
        partial = partial.view(torch.float32) if floating or size is not None else partial
        counters = scratch(x.device, "counters", tiles, torch.int32)
    overlap = overlaps(x.device)
    if weight.bits == 4:
        x = x.view(torch.int32 if floating else torch.int16)
    split_kernel[grid](
        x,
        weight.codes,
        y,
        partial,
        counters,
        row_scale,
        weight.scale,
        x0,
        weight.w0,
        bias,
        tokens,
        outs,
        ins,
        x.stride(0),
        y.stride(0),
        0 if row_scale.numel() == 1 else 1,
        split_ins,
        BN=config.outs,
        BT=config.tokens,
        BK=step,
        SPLITS=splits,
        BITS=weight.bits,
        FLOAT=floating,
        SIZE=size,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )
    return y
