"""The two vector-matrix products of decode attention on packed K and V, one by one, in Triton.

The decode kernels fuse both products with the softmax, so InnerQ's claim about each needs kernels
of its own. Each works on one matrix per program row, in canonical bytes, asymmetric codes:

             inner: one scale for         outer: one scale for
    q K^T    GROUP channels of a token    GROUP tokens of a channel
    p V      GROUP tokens of a channel    GROUP channels of a token

Scales multiply partial sums of GROUP products (inner) or the vector (outer). So both sides spend
one multiplication by a scale per GROUP codes, never one per code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.cache.packed import PackedTensor

# Tiles that either side may choose from: tokens, warps.
TILES = ((32, 4), (64, 4), (128, 4), (128, 8))
# Programs per SM that the values kernel is split into.
PROGRAMS_PER_SM = 8
CPU_PROGRAMS = 6


@triton.jit
def load_codes(
    p_codes, i_m, o_n, m_n, tokens, D: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr
):
    """Codes of BN tokens as numbers, [BN, D]; 0 beyond the end."""
    SLOTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = D // SLOTS
    o_row = i_m.to(tl.int64) * tokens + o_n
    p_byte = p_codes + o_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_byte = tl.load(p_byte, mask=m_n[:, None], other=0)
    o_shift = (8 - BITS - BITS * tl.arange(0, SLOTS)).to(tl.uint8)
    b_code = (b_byte[:, :, None] >> o_shift[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(b_code, (BN, D)).to(tl.float32)


@triton.jit
def load_params(p_scale, p_zero, o_row, m_row, COLUMNS: tl.constexpr):
    """(scale, zero_point) of some rows, [rows, COLUMNS]; 0 where there is no row."""
    o_at = o_row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b_scale = tl.load(p_scale + o_at, mask=m_row[:, None], other=0).to(tl.float32)
    b_zero = tl.load(p_zero + o_at, mask=m_row[:, None], other=0).to(tl.float32)
    return b_scale, b_zero


@triton.jit
def scores_kernel(
    p_q, p_codes, p_scale, p_zero, p_out, tokens, D: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_d q[m, d] K[m, n, d]."""
    i_m, i_t = tl.program_id(0), tl.program_id(1)
    o_n = i_t * BN + tl.arange(0, BN)
    m_n = o_n < tokens
    b_q = tl.load(p_q + i_m * D + tl.arange(0, D)).to(tl.float32)
    b_code = load_codes(p_codes, i_m, o_n, m_n, tokens, D, BITS, BN)
    if INNER:
        NG: tl.constexpr = D // GROUP
        o_row = i_m.to(tl.int64) * tokens + o_n
        b_scale, b_zero = load_params(p_scale, p_zero, o_row, m_n, NG)
        b_dot = tl.sum(tl.reshape(b_code * b_q[None, :], (BN, NG, GROUP)), 2)
        b_sum = tl.sum(tl.reshape(b_q, (NG, GROUP)), 1)
        b_out = tl.sum(b_dot * b_scale + b_sum[None, :] * b_zero, 1)
    else:
        NT: tl.constexpr = BN // GROUP
        groups = tl.cdiv(tokens, GROUP)
        o_g = i_t * NT + tl.arange(0, NT)
        o_row = i_m.to(tl.int64) * groups + o_g
        b_scale, b_zero = load_params(p_scale, p_zero, o_row, o_g < groups, D)
        b_product = tl.reshape(b_code, (NT, GROUP, D)) * (b_q[None, :] * b_scale)[:, None, :]
        b_offset = tl.sum(b_q[None, :] * b_zero, 1)
        b_out = tl.reshape(tl.sum(b_product, 2) + b_offset[:, None], (BN,))
    tl.store(p_out + i_m.to(tl.int64) * tokens + o_n, b_out, mask=m_n)


@triton.jit
def values_kernel(
    p_p, p_codes, p_scale, p_zero, p_out, tokens, splits, D: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[m, s, d] = sum over the tokens n of split s of p[m, n] V[m, n, d]."""
    i_m, i_s = tl.program_id(0), tl.program_id(1)
    NT: tl.constexpr = BN // GROUP
    NG: tl.constexpr = D // GROUP
    groups = tl.cdiv(tokens, GROUP)
    tiles = tl.cdiv(tl.cdiv(tokens, BN), splits)
    b_out = tl.zeros((D,), tl.float32)
    for i_t in range(i_s * tiles, (i_s + 1) * tiles):
        o_n = i_t * BN + tl.arange(0, BN)
        m_n = o_n < tokens
        o_row = i_m.to(tl.int64) * tokens + o_n
        b_p = tl.load(p_p + o_row, mask=m_n, other=0).to(tl.float32)
        b_code = load_codes(p_codes, i_m, o_n, m_n, tokens, D, BITS, BN)
        if INNER:
            o_g = i_t * NT + tl.arange(0, NT)
            o_param = i_m.to(tl.int64) * groups + o_g
            b_scale, b_zero = load_params(p_scale, p_zero, o_param, o_g < groups, D)
            b_sum = tl.sum(tl.reshape(b_code * b_p[:, None], (NT, GROUP, D)), 1)
            b_weight = tl.sum(tl.reshape(b_p, (NT, GROUP)), 1)
            b_out += tl.sum(b_sum * b_scale + b_weight[:, None] * b_zero, 0)
        else:
            b_scale, b_zero = load_params(p_scale, p_zero, o_row, m_n, NG)
            b_weight = b_p[:, None] * b_scale
            b_sum = tl.sum(tl.reshape(b_code, (BN, NG, GROUP)) * b_weight[:, :, None], 0)
            b_offset = tl.sum(b_p[:, None] * b_zero, 0)
            b_out += tl.reshape(b_sum + b_offset[:, None], (D,))
    tl.store(p_out + (i_m.to(tl.int64) * splits + i_s) * D + tl.arange(0, D), b_out)


def packed_scores(query: Tensor, key: PackedTensor, tile: tuple[int, int]) -> Tensor:
    """q K^T. query: [1, matrices, 1, d]. Returns [1, matrices, 1, n] in the query's type.

    tile: of TILES; a multiple of the group's tokens.
    """
    matrices, tokens = key.codes.shape[1], key.tokens
    out = query.new_empty(1, matrices, 1, tokens)
    grid = (matrices, triton.cdiv(tokens, tile[0]))
    scores_kernel[grid](
        query, key.codes, key.scale, key.zero_point, out, tokens, INNER=key.per_token,
        **_constants(key, tile),
    )  # fmt: skip
    return out


def packed_values(weights: Tensor, value: PackedTensor, tile: tuple[int, int]) -> Tensor:
    """p V. weights: [1, matrices, 1, n]. Returns [1, matrices, 1, d] in the weights' type."""
    matrices, tokens = value.codes.shape[1], value.tokens
    splits = min(triton.cdiv(tokens, tile[0]), max(1, _programs(weights.device) // matrices))
    partial = weights.new_empty(1, matrices, splits, value.head_dim, dtype=torch.float32)
    values_kernel[(matrices, splits)](
        weights, value.codes, value.scale, value.zero_point, partial, tokens, splits,
        INNER=not value.per_token, **_constants(value, tile),
    )  # fmt: skip
    return partial.sum(2, keepdim=True).to(weights.dtype)


def _constants(x: PackedTensor, tile: tuple[int, int]) -> dict[str, int]:
    return {
        "D": x.head_dim,
        "BITS": x.spec.bits,
        "GROUP": x.spec.group,
        "BN": tile[0],
        "num_warps": tile[1],
    }


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
