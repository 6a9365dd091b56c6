"""Score calibration in Triton: the range of the visual scores, and the map that it gives.

`score_range_kernel` and `calibration_map` are the two halves of `reference._calibrate`.
Names are as in `triton.kernels`.
"""

# Constants of Triton are upper case.

import triton
import triton.language as tl

from duotone.attention.triton.signs import block_start
from duotone.attention.triton.tiles import load_fold, query_operands, tile_scores
from duotone.attention.triton.walk import (
    block_end,
    block_tile,
    find_block,
    split_range,
    visible_tokens,
)
from duotone.quant.calibration import MIN_SLOPE, MIN_WIDTH

SLOPE_FLOOR = tl.constexpr(MIN_SLOPE)
WIDTH_FLOOR = tl.constexpr(MIN_WIDTH)

RANGE_RUNTIME = [
    "sm_scale", "kv_heads", "mask_width", "splits", "first_split", "all_splits", "k_batch_rows",
    "k_head_rows", "k_blocks",
]  # fmt: skip


@triton.jit
def range_tile(
    b_low, b_high, b_q, b_factor, b_offset, p_k, at, where, p_mask, i_b, i_k, mask_width,
    first, end, HP: tl.constexpr, HAS_MASK: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(minimum, maximum) of q . k_hat so far and over the tokens [first, end) of one tile."""
    o_t = first + tl.arange(0, BN)
    m_t = o_t < end
    b_s = tile_scores(
        b_q, b_factor, b_offset, p_k, at, where, i_k, o_t, m_t, KIND, D, BITS, CLASSES, COLUMNS,
        GROUP, WIDTH, PAD, HP, BN, DT, PRECISION,
    )  # fmt: skip
    m_seen = visible_tokens(p_mask, i_b, mask_width, o_t, m_t, HAS_MASK)[None, :]
    b_low = tl.minimum(b_low, tl.min(tl.where(m_seen, b_s, float("inf")), 1))
    b_high = tl.maximum(b_high, tl.max(tl.where(m_seen, b_s, float("-inf")), 1))
    return b_low, b_high


@triton.jit(do_not_specialize=RANGE_RUNTIME)
def score_range_kernel(
    p_q, p_k, p_k_scale, p_k_zero, p_k_signs, p_k_modes, p_k_fold, p_k_affine, p_k_offsets,
    p_lengths, p_mask, p_ranges,
    sm_scale, kv_heads, mask_width, splits, first_split, all_splits, k_batch_rows, k_head_rows,
    k_blocks,
    G: tl.constexpr, HP: tl.constexpr, HAS_MASK: tl.constexpr, K_KIND: tl.constexpr,
    K_D: tl.constexpr, K_BITS: tl.constexpr, K_CLASSES: tl.constexpr, K_COLUMNS: tl.constexpr,
    K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, K_TILES: tl.constexpr,
    BN: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Minimum and maximum of sm_scale * q . k_hat over one split's visible keys.

    Program (batch * kv_heads, splits) writes p_ranges [batch * q_heads, all_splits, 2]; (inf, -inf)
    where it sees no key. Reference: the first half of `reference._calibrate`.
    """
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // kv_heads, i_bh % kv_heads
    o_h = tl.arange(0, HP)
    m_h = o_h < G
    o_row = i_bh.to(tl.int64) * G + o_h
    i_k = i_b.to(tl.int64) * k_batch_rows + i_h.to(tl.int64) * k_head_rows
    i_t, stop = split_range(p_lengths, i_b, i_split, splits, BN)
    i_kp = i_bh.to(tl.int64) * k_blocks
    b_low = tl.full((HP,), float("inf"), tl.float32)
    b_high = tl.full((HP,), float("-inf"), tl.float32)
    i_kb = 0
    if K_KIND == "block":
        p_k_offsets += i_b.to(tl.int64) * (k_blocks + 1)
        i_kb = find_block(p_k_offsets, k_blocks, i_t, K_GROUP)
    else:
        b_q, b_factor, b_offset = query_operands(
            p_q, o_row, m_h, K_KIND, K_D, K_BITS, K_PAD, UNIT, HP, DT
        )
    k_at = (p_k_scale, p_k_zero, p_k_signs, p_k_modes, p_k_offsets)
    if K_TILES > 0:
        last = find_block(p_k_offsets, k_blocks, stop - 1, K_GROUP)
        tiles = tl.where(i_t < stop, (last + 1 - i_kb) * K_TILES, 0)
        for i in range(tiles):
            i_block = i_kb + i // K_TILES
            first, end = block_tile(p_k_offsets, k_blocks, i_block, i % K_TILES, i_t, stop, BN)
            b_q, b_factor, b_offset = load_fold(
                p_k_fold, p_k_affine, i_kp + i_block, o_h, m_h, G, K_BITS, K_PAD
            )
            k_where = (i_kp + i_block, block_start(k_at, i_block, K_KIND))
            b_low, b_high = range_tile(
                b_low, b_high, b_q, b_factor, b_offset, p_k, k_at, k_where, p_mask, i_b, i_k,
                mask_width, first, end, HP, HAS_MASK, K_KIND, K_D, K_BITS, K_CLASSES, K_COLUMNS,
                K_GROUP, K_WIDTH, K_PAD, BN, DT, PRECISION,
            )  # fmt: skip
    else:
        while i_t < stop:
            end = stop
            if K_KIND == "block":
                end = tl.minimum(block_end(p_k_offsets, k_blocks, i_kb, stop), stop)
                b_q, b_factor, b_offset = load_fold(
                    p_k_fold, p_k_affine, i_kp + i_kb, o_h, m_h, G, K_BITS, K_PAD
                )
            k_where = (i_kp + i_kb, block_start(k_at, i_kb, K_KIND))
            for i in range(i_t, end, BN):
                b_low, b_high = range_tile(
                    b_low, b_high, b_q, b_factor, b_offset, p_k, k_at, k_where, p_mask, i_b, i_k,
                    mask_width, i, end, HP, HAS_MASK, K_KIND, K_D, K_BITS, K_CLASSES, K_COLUMNS,
                    K_GROUP, K_WIDTH, K_PAD, BN, DT, PRECISION,
                )  # fmt: skip
            i_t = end
            i_kb += 1
    p_out = p_ranges + (o_row * all_splits + first_split + i_split) * 2
    tl.store(p_out, b_low * sm_scale, mask=m_h)
    tl.store(p_out + 1, b_high * sm_scale, mask=m_h)


@triton.jit
def calibration_map(
    p_ranges, o_row, m_h, tau1, tau2, range_splits, HP: tl.constexpr, CALIBRATE: tl.constexpr
):
    """(slope, offset) [rows] of `quant.calibration_affine` from the partial ranges; else (1, 0).

    p_ranges: [rows, range_splits, 2], minimum and maximum; a row without visual keys has none.
    """
    b_slope = tl.full((HP,), 1.0, tl.float32)
    b_offset = tl.zeros((HP,), tl.float32)
    if CALIBRATE:
        # Reduced once after the loop: Triton 3.6 fails on these reductions inside it.
        b_low = tl.full((HP, 16), float("inf"), tl.float32)
        b_high = tl.full((HP, 16), float("-inf"), tl.float32)
        for i in range(0, range_splits, 16):
            o_split = i + tl.arange(0, 16)
            m_part = m_h[:, None] & (o_split < range_splits)[None, :]
            p_part = p_ranges + (o_row[:, None] * range_splits + o_split[None, :]) * 2
            b_low = tl.minimum(b_low, tl.load(p_part, mask=m_part, other=float("inf")))
            b_high = tl.maximum(b_high, tl.load(p_part + 1, mask=m_part, other=float("-inf")))
        b_gamma, b_delta = tl.min(b_low, 1), tl.max(b_high, 1)
        m_none = b_delta < b_gamma
        b_width = tl.where(m_none, 0.0, b_delta - b_gamma)
        m_flat = b_width <= WIDTH_FLOOR
        b_slope = 1 + (tau1 - tau2) / tl.where(m_flat, 1.0, b_width)
        b_slope = tl.where(m_flat, 1.0, tl.maximum(b_slope, SLOPE_FLOOR))
        b_delta = tl.where(m_none, 0.0, b_delta)
        b_offset = b_delta - tau2 - b_slope * b_delta
    return b_slope, b_offset
