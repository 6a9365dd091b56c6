"""The rotary embedding of a step in one launch, q and k contiguous: for 16 bit and few bits alike.

Attention kernels want q contiguous. Compiled by torch, a launch that writes q and k separately
takes twice as long for small batches as one that writes both together. A later copy of q would cost
as much.
"""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous

# Heads of a program.
HEADS = 8


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    query,
    key,
    x_stride,
    heads,
    q_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(0)
    o_head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    o_channel = tl.arange(0, HALF)[None, :]
    m_channel = o_channel < half
    wait_for_previous(OVERLAP)
    b_cos = tl.load(cos + row * half + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + row * half + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    m_head = (o_head < heads) & m_channel
    p_x = x + row.to(tl.int64) * x_stride + o_head * (2 * half) + o_channel
    first = tl.load(p_x, mask=m_head, other=0.0).to(tl.float32)
    second = tl.load(p_x + half, mask=m_head, other=0.0).to(tl.float32)
    low = (first * b_cos - second * b_sin).to(query.dtype.element_ty)
    high = (second * b_cos + first * b_sin).to(query.dtype.element_ty)
    k_heads = heads - q_heads
    p_q = query + (row.to(tl.int64) * q_heads + o_head) * (2 * half) + o_channel
    p_k = key + (row.to(tl.int64) * k_heads + o_head - q_heads) * (2 * half) + o_channel
    m_q, m_k = m_head & (o_head < q_heads), m_head & (o_head >= q_heads)
    tl.store(p_q, low, mask=m_q)
    tl.store(p_q + half, high, mask=m_q)
    tl.store(p_k, low, mask=m_k)
    tl.store(p_k + half, high, mask=m_k)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, q_heads: int) -> tuple[Tensor, Tensor]:
    """Rotary embedding by halves: q and k, each contiguous.

    x: [rows, heads, head_dim], the first heads are q's, head_dim and heads adjacent. cos, sin:
    [rows, 1, head_dim / 2], contiguous.
    """
    rows, heads, width = x.shape
    query = torch.empty(rows, q_heads, width, dtype=x.dtype, device=x.device)
    key = torch.empty(rows, heads - q_heads, width, dtype=x.dtype, device=x.device)
    overlap = overlaps(x.device)
    rotary_kernel[(rows, triton.cdiv(heads, HEADS))](
        x,
        cos,
        sin,
        query,
        key,
        x.stride(0),
        heads,
        q_heads,
        width // 2,
        HEADS=HEADS,
        HALF=triton.next_power_of_2(width // 2),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
    )
    return query, key
