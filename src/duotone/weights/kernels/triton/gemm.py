"""W8A8 in Triton: int8 x int8 -> int32 on tensor cores, tiles by TMA, the epilogue in registers.

Programs walk over output tiles in groups of GROUP rows of tiles, so that programs that run at one
time share tiles in L2. Both operands have `in` as their contiguous axis, as Hopper's int8 WGMMA
wants them.

Where all tiles or the last round's are too few, programs would idle. Such tiles are cut along `in`
(as stream-K does). The last program to finish a part adds up all of them, exact as integers are.

With groups of scales a step of `in` lies in one group; its product is scaled and added in fp32, in
ascending order. Such sums depend on their order, so tiles stay whole.

The programs fill the device. Starting them before their input is ready costs more than the gap
between launches. So this kernel, unlike the kernels for few tokens, does not overlap the previous
launch.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from duotone.weights.kernels.devices import multiprocessors
from duotone.weights.kernels.scratch import scratch
from duotone.weights.kernels.triton.epilogue import epilogue, group_scale
from duotone.weights.modules.packed_weight import PackedWeight


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes [tokens, outs, ins], tiles per group, warps, stages; programs per SM or 0: all.

    registers: the most per thread, None for the compiler's choice. parts: the most parts of a tile,
    where tiles are too few for all programs; not with groups of scales.
    """

    tokens: int
    outs: int
    ins: int
    group: int = 8
    warps: int = 8
    stages: int = 4
    per_sm: int = 1
    flatten: bool = False
    registers: int | None = None
    parts: int = 1


@dataclass(frozen=True)
class Rounds:
    """Shares of programs: `whole` tiles, then `tail` tiles in `parts` of `part_ins` columns."""

    programs: int
    whole: int
    tail: int = 0
    parts: int = 1
    part_ins: int = 0


def rounds(tiles: int, ins: int, slots: int, config: GemmConfig) -> Rounds:
    """slots: programs that run at one time."""
    tail = tiles % slots
    parts = min(config.parts, slots // tail, -(-ins // config.ins)) if tail else 1
    if parts == 1:
        return Rounds(min(tiles, slots), tiles)
    part_ins = -(-ins // (parts * config.ins)) * config.ins
    # as long as steps are whole, fewer parts may do
    parts = -(-ins // part_ins)
    whole = tiles - tail
    return Rounds(min(whole + tail * parts, slots), whole, tail, parts, part_ins)


@triton.jit
def _add_parts(sums, partial, arrived, m_row, i_part, parts):
    # (whether all parts of this tile have arrived, their sum). partial, arrived: of the tile
    BM: tl.constexpr = sums.shape[0]
    BN: tl.constexpr = sums.shape[1]
    p_part = partial + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    m_part = m_row[:, None]
    tl.store(p_part + i_part * (BM * BN), sums, mask=m_part)
    # all of this program's stores come before its arrival
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1
    if is_last:
        for i_other in range(1, parts):
            # every part but this program's own, which stays in registers. Loading other parts into
            # its layout keeps all loads of a part in flight at one time
            p_other = p_part + (i_part + i_other) % parts * (BM * BN)
            sums += tl.load(p_other, mask=m_part, other=0, cache_modifier=".cg")
        tl.store(arrived, 0)
    return is_last, sums


# one compilation for all numbers of tokens and tiles
@triton.jit(do_not_specialize=["tokens", "whole", "units", "parts"])
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
    partial,
    arrived,
    whole,
    units,
    parts,
    part_ins,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    CUT: tl.constexpr,
):
    # SIZE: columns that share a scale, a multiple of BK; None: all. units: whole tiles, then, if
    # CUT, parts
    tiles_m, tiles_n = tl.cdiv(tokens, BM), tl.cdiv(outs, BN)
    for i_unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        i_tile, i_part, first_k, last_k = i_unit, 0, 0, ins
        if CUT:
            i_tail = tl.maximum(i_unit - whole, 0)
            i_tile, i_part = tl.minimum(i_unit, whole) + i_tail // parts, i_tail % parts
            first_k = i_part * part_ins
            last_k = tl.where(i_unit < whole, ins, tl.minimum(first_k + part_ins, ins))
        in_group = GROUP * tiles_n
        first = i_tile // in_group * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        i_m = first + i_tile % in_group % size
        i_n = i_tile % in_group // size
        # the last tile of rows ends with the tensor's rows. Rows beyond the tensor cost TMA more
        # than real rows; rows of two tiles get the same numbers twice
        first_row = tl.minimum(i_m * BM, tl.maximum(tokens - BM, 0))
        o_row = first_row + tl.arange(0, BM)
        o_out = i_n * BN + tl.arange(0, BN)
        sums = tl.zeros([BM, BN], tl.int32 if SIZE is None else tl.float32)
        for k in range(first_k, last_k, BK):
            b_x = x.load([first_row, k])
            b_w = w.load([i_n * BN, k])
            if SIZE is None:
                sums = tl.dot(b_x, b_w.T, sums, out_dtype=tl.int32)
            else:
                # loaded before the product, after which it is needed
                b_s = group_scale(out_scale, o_out, k // SIZE, outs, ins // SIZE)
                part = tl.dot(b_x, b_w.T, out_dtype=tl.int32)
                sums += part.to(tl.float32) * b_s[None, :]
        is_last = True
        if CUT:
            is_last = i_unit < whole
            if i_unit >= whole:
                i_tail = i_tile - whole
                p_partial = partial + i_tail.to(tl.int64) * (parts * BM * BN)
                is_last, sums = _add_parts(
                    sums, p_partial, arrived + i_tail, o_row < tokens, i_part, parts
                )
        if is_last:
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
                FACTOR,
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
    codes times 16. With groups of scales config.ins divides their size.
    """
    tokens, ins = x_q.shape
    outs = len(codes)
    y = torch.empty(tokens, outs, dtype=dtype, device=x_q.device) if out is None else out
    tiles = triton.cdiv(tokens, config.tokens) * triton.cdiv(outs, config.outs)
    if weight.group_size is not None:
        config = replace(config, parts=1)
    cut = rounds(tiles, ins, config.per_sm * multiprocessors(x_q.device) or tiles, config)
    partial = arrived = None
    if cut.parts > 1:
        count = cut.tail * cut.parts * config.tokens * config.outs
        partial = scratch(x_q.device, "tail sums", count, torch.int32)
        arrived = scratch(x_q.device, "tail counters", cut.tail, torch.int32)
    gemm_kernel[(cut.programs,)](
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
        partial,
        arrived,
        cut.whole,
        cut.whole + cut.tail * cut.parts,
        cut.parts,
        cut.part_ins,
        BM=config.tokens,
        BN=config.outs,
        BK=config.ins,
        GROUP=config.group,
        FLATTEN=config.flatten,
        FACTOR=1.0 if weight.bits == 8 else 0.0625,
        SIZE=weight.group_size,
        CUT=cut.parts > 1,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        enable_fp_fusion=False,
    )
    return y
