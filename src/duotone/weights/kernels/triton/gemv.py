"""Product for one token: 32-bit words of weights times words of x by dp4a.

No splits and no tensor cores: a program holds a few rows and walks their columns in steps. Steps
are so long that loads of many bytes are in flight, the first before the previous kernel ends.

With groups of scales, a step's products are summed by group in int32 and scaled. The scaled sums
are added in fp32 to the sums of earlier steps, group by group. The groups of a step are added last.
"""

# ruff: noqa: D103
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton.overlap import (
    overlaps,
    start_next,
    wait_for_previous,
)
from duotone.weights.kernels.triton.unpack import ASM, dot4, even_and_odd_bytes
from duotone.weights.modules.packed_weight import PackedWeight


@dataclass(frozen=True)
class GemvConfig:
    """Rows of the weight per program, 32-bit words of a row per step, warps."""

    outs: int = 8
    words: int = 256
    warps: int = 4


@triton.jit
def _add_products(
    b_w, x, o_word, m_word, sums, BN: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr
):
    # words b_w [BN, BW] times the words of x at o_word -> sums + [BN, BW]
    BW: tl.constexpr = o_word.shape[0]
    if BITS == 4:
        b_first = tl.load(x + 2 * o_word, mask=m_word, other=0)
        b_second = tl.load(x + 2 * o_word + 1, mask=m_word, other=0)
        even, odd = even_and_odd_bytes(b_first, b_second, ASM)
        # nibbles in the upper halves of bytes: codes times 16
        low, high = (b_w << 4) & -0x0F0F0F10, b_w & -0x0F0F0F10
        sums = dot4(low, tl.broadcast_to(even[None, :], [BN, BW]), sums, ASM)
        sums = dot4(high, tl.broadcast_to(odd[None, :], [BN, BW]), sums, ASM)
    else:
        b_x = tl.load(x + o_word, mask=m_word, other=0)
        sums = dot4(b_w, tl.broadcast_to(b_x[None, :], [BN, BW]), sums, ASM)
    return sums


@triton.jit
def _scales_of(
    out_scale, o_out, first, outs, words, BW: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr
):
    # the scales of a step from word `first` on, one per part -> [BN, BW // PART]
    groups = words // SIZE
    o_group = first // SIZE + tl.arange(0, BW // PART)
    m_scale = (o_out < outs)[:, None] & (o_group < groups)[None, :]
    p_scale = out_scale + o_out[:, None] * groups + o_group[None, :]
    return tl.load(p_scale, mask=m_scale, other=0.0)


@triton.jit
def _parts(sums, PART: tl.constexpr):
    # int32 [BN, BW] -> fp32 sums of PART words each [BN, BW // PART]
    BN: tl.constexpr = sums.shape[0]
    BW: tl.constexpr = sums.shape[1]
    return tl.sum(tl.reshape(sums, [BN, BW // PART, PART]), 2).to(tl.float32)


@triton.jit
def gemv_kernel(
    x,
    w,
    y,
    row_scale,
    out_scale,
    x0,
    w0,
    bias,
    outs,
    words,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
    SIZE: tl.constexpr,
):
    # SIZE: words of a group of scales; None: one scale per channel
    PART: tl.constexpr = None if SIZE is None else min(SIZE, BW)
    start_next(OVERLAP)
    o_out = tl.program_id(0) * BN + tl.arange(0, BN)
    m_out = o_out < outs
    p_w = w + o_out.to(tl.int64)[:, None] * words
    o_word = tl.arange(0, BW)
    m_word = o_word < words
    b_w = tl.load(p_w + o_word[None, :], mask=m_out[:, None] & m_word[None, :], other=0)
    if SIZE is not None:
        b_s = _scales_of(out_scale, o_out, 0, outs, words, BW, PART, SIZE)
    wait_for_previous(OVERLAP)
    sums = tl.zeros([BN, BW], tl.int32)
    sums = _add_products(b_w, x, o_word, m_word, sums, BN, BITS, ASM)
    if SIZE is not None:
        sums = _parts(sums, PART) * b_s
    for first in range(BW, words, BW):
        o_word = first + tl.arange(0, BW)
        m_word = o_word < words
        b_w = tl.load(p_w + o_word[None, :], mask=m_out[:, None] & m_word[None, :], other=0)
        if SIZE is None:
            sums = _add_products(b_w, x, o_word, m_word, sums, BN, BITS, ASM)
        else:
            b_s = _scales_of(out_scale, o_out, first, outs, words, BW, PART, SIZE)
            zero = tl.zeros([BN, BW], tl.int32)
            sums += _parts(_add_products(b_w, x, o_word, m_word, zero, BN, BITS, ASM), PART) * b_s
    factor: tl.constexpr = 0.0625 if BITS == 4 else 1.0
    b_y = (tl.sum(sums, 1).to(tl.float32) * factor) * tl.load(row_scale)
    if SIZE is None:
        b_y = b_y * tl.load(out_scale + o_out, mask=m_out, other=0.0)
    if x0 is not None:
        b_w0 = tl.load(w0 + o_out, mask=m_out, other=0.0).to(tl.float32)
        b_y += tl.load(x0).to(tl.float32) * b_w0
    if bias is not None:
        b_y += tl.load(bias + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(y + o_out, b_y.to(y.dtype.element_ty), mask=m_out)


def gemv(
    x_q: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: GemvConfig,
) -> Tensor:
    """Launch: int8 x_q [1, in], contiguous, `in` a multiple of 8 (4 bits) or 4 (8 bits).

    Groups of scales: of a power of two of columns, at least one word.
    """
    outs = len(weight.codes)
    y = torch.empty(1, outs, dtype=dtype, device=x_q.device)
    codes = weight.codes.view(torch.int32)
    overlap = overlaps(x_q.device)
    gemv_kernel[(triton.cdiv(outs, config.outs),)](
        x_q.view(torch.int32),
        codes,
        y,
        row_scale,
        weight.scale,
        x0,
        weight.w0,
        bias,
        outs,
        codes.shape[1],
        BN=config.outs,
        BW=config.words,
        BITS=weight.bits,
        ASM=ASM,
        OVERLAP=overlap,
        SIZE=None if weight.group_size is None else weight.group_size * weight.bits // 32,
        launch_pdl=overlap,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return y
