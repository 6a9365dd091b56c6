"""What stands between two products of a decode step, in one launch: RoPE, cache, attention, codes.

One query per sequence against a short 16-bit cache. Programs are (kv head, split, sequence); a
split is one tile of tokens, and the last one to come merges all in order.
"""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.scratch import scratch
from duotone.weights.kernels.triton.overlap import overlaps, start_next, wait_for_previous
from duotone.weights.kernels.triton.rows import to_codes
from duotone.weights.kernels.triton.unpack import ASM

TILE = 64
# Rows of a product on tensor cores: the q heads of a kv head, filled up.
ROWS = 16
ROPE_BASE = 1e6


@triton.jit
def _turned(p, o, m, cos, sin, D: tl.constexpr):
    # both halves of heads at p + o, rotated by RoPE
    first = tl.load(p + o, mask=m, other=0.0).to(tl.float32)
    second = tl.load(p + o + D // 2, mask=m, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attend_kernel(
    qkv,
    keys,
    values,
    cosines,
    sines,
    position,
    scale,
    out,
    partial,
    counters,
    length,
    sm_scale,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    # the interpreter multiplies bfloat16's bits
    dtype: tl.constexpr = tl.bfloat16 if ASM else tl.float32
    i_kv, i_split, i_seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_row, o_half, o_d = tl.arange(0, ROWS), tl.arange(0, D // 2), tl.arange(0, D)
    o_token = i_split * TILE + tl.arange(0, TILE)
    # the cache as earlier steps left it
    at = tl.load(position)
    m_old = (o_token < at)[:, None]
    o_cache = ((i_seq * KV + i_kv) * length + o_token).to(tl.int64)[:, None] * D
    b_k1 = tl.load(keys + o_cache + o_half[None, :], mask=m_old, other=0.0)
    b_k2 = tl.load(keys + o_cache + D // 2 + o_half[None, :], mask=m_old, other=0.0)
    b_v = tl.load(values + o_cache + o_d[None, :], mask=m_old, other=0.0)
    cos = tl.load(cosines + at * (D // 2) + o_half)[None, :]
    sin = tl.load(sines + at * (D // 2) + o_half)[None, :]
    wait_for_previous(OVERLAP)
    p_in = qkv + i_seq * ((Q + 2 * KV) * D)
    m_row = (o_row < Q // KV)[:, None]
    o_q = (i_kv * (Q // KV) + o_row)[:, None] * D + o_half[None, :]
    q1, q2 = _turned(p_in, o_q, m_row, cos, sin, D)
    # the new token: stored by the split it falls into, which has it in registers
    o_new = (Q + i_kv) * D + o_half[None, :]
    k1, k2 = _turned(p_in, o_new, o_half[None, :] >= 0, cos, sin, D)
    v = tl.load(p_in + (Q + KV + i_kv) * D + o_d[None, :])
    m_new = (o_token == at)[:, None]
    b_k1 = tl.where(m_new, k1.to(b_k1.dtype), b_k1)
    b_k2 = tl.where(m_new, k2.to(b_k2.dtype), b_k2)
    b_v = tl.where(m_new, v, b_v)
    tl.store(keys + o_cache + o_half[None, :], b_k1, mask=m_new)
    tl.store(keys + o_cache + D // 2 + o_half[None, :], b_k2, mask=m_new)
    tl.store(values + o_cache + o_d[None, :], b_v, mask=m_new)
    # queries are rounded as a model rounds them
    q1, q2 = q1.to(tl.bfloat16).to(dtype), q2.to(tl.bfloat16).to(dtype)
    score = tl.dot(q1, tl.trans(b_k1.to(dtype)))
    score = tl.dot(q2, tl.trans(b_k2.to(dtype)), score) * sm_scale
    score = tl.where((o_token <= at)[None, :], score, float("-inf"))
    most = tl.maximum(tl.max(score, 1), -1e30)
    share = tl.exp(score - most[:, None])
    total = tl.sum(share, 1)
    mixed = tl.dot(share.to(dtype), b_v.to(dtype))
    mine = True
    if SPLITS > 1:
        # ROWS x D sums, then ROWS maxima, then ROWS totals
        i_unit = i_seq * KV + i_kv
        p_unit = partial + i_unit * (SPLITS * ROWS * (D + 2))
        p_mine = p_unit + i_split * (ROWS * (D + 2))
        tl.store(p_mine + o_row[:, None] * D + o_d[None, :], mixed)
        tl.store(p_mine + ROWS * D + o_row, most)
        tl.store(p_mine + ROWS * (D + 1) + o_row, total)
        # all of this program's stores come before its arrival
        tl.debug_barrier()
        mine = tl.atomic_add(counters + i_unit, 1, sem="acq_rel") == SPLITS - 1
        if mine:
            most = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, D], tl.float32)
            for other in range(SPLITS):
                p = p_unit + other * (ROWS * (D + 2))
                b_most = tl.load(p + ROWS * D + o_row, cache_modifier=".cg")
                b_total = tl.load(p + ROWS * (D + 1) + o_row, cache_modifier=".cg")
                b_mixed = tl.load(p + o_row[:, None] * D + o_d[None, :], cache_modifier=".cg")
                larger = tl.maximum(most, b_most)
                old, new = tl.exp(most - larger), tl.exp(b_most - larger)
                total = total * old + b_total * new
                mixed = mixed * old[:, None] + b_mixed * new[:, None]
                most = larger
            tl.store(counters + i_unit, 0)
    if mine:
        p_out = out + i_seq * (Q * D) + (i_kv * (Q // KV) + o_row)[:, None] * D + o_d[None, :]
        b_out = (mixed / total[:, None]).to(tl.bfloat16)
        if scale is not None:
            tl.store(p_out, to_codes(b_out.to(tl.float32), tl.load(scale)), mask=m_row)
        else:
            tl.store(p_out, b_out, mask=m_row)


def rope_table(length: int, d: int, device: torch.device) -> Tensor:
    """Cosines and sines of RoPE's angles: fp32 [2, length, d / 2]."""
    inverse = ROPE_BASE ** (torch.arange(0, d, 2, device=device) / -d)
    angles = torch.arange(length, device=device)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()))


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    position: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Attention of one new token per sequence, which is appended at `position`.

    qkv: bf16 [sequences, (q heads + 2 kv heads) * D], before RoPE. keys, values: bf16
    [sequences, kv heads, length, D]. table: of `rope_table`. position: int32 [1], of all
    sequences. scale: float32 [1]: then the result is int8 codes, else bf16.
    Returns [sequences, q heads * D].
    """
    sequences, kv, length, d = keys.shape
    q = qkv.shape[1] // d - 2 * kv
    splits = triton.cdiv(length, TILE)
    dtype = torch.bfloat16 if scale is None else torch.int8
    out = torch.empty(sequences, q * d, dtype=dtype, device=qkv.device)
    count = sequences * kv * splits * ROWS * (d + 2)
    overlap = overlaps(qkv.device)
    attend_kernel[(kv, splits, sequences)](
        qkv,
        keys,
        values,
        table[0],
        table[1],
        position,
        scale,
        out,
        scratch(qkv.device, "attention", count, torch.float32),
        scratch(qkv.device, "attention counters", sequences * kv, torch.int32),
        length,
        d**-0.5,
        Q=q,
        KV=kv,
        D=d,
        ROWS=ROWS,
        TILE=TILE,
        SPLITS=splits,
        ASM=ASM,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
    )
    return out
