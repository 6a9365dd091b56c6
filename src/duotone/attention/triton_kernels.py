"""Triton kernels of decode attention: score range, one segment's attention, merge of the partials.

A program takes one kv head of one sequence and one split of a segment's tokens, and walks stretches
of tokens that share their blocks of K and of V; `triton_tiles` does the arithmetic of a tile.

Names: i_ indices, o_ index vectors, p_ pointers, b_ values in registers, m_ masks. Nothing but
head dims, bits, groups and flags is constexpr, and integers are not specialized, so a new length
or batch compiles nothing.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: RUF005, SIM300

import triton
import triton.language as tl

from duotone.attention.triton_tiles import (
    enter_block,
    fold_query,
    leave_block,
    plane_shift,
    tile_scores,
    tile_values,
)
from duotone.quant.calibration import MIN_SLOPE

LOG2E = tl.constexpr(1.4426950408889634)
SLOPE_FLOOR = tl.constexpr(MIN_SLOPE)
# Log2 of what the largest probability becomes in fp16 (block scales): small ones keep their bits.
HALF_SHIFT = tl.constexpr(12.0)


@triton.jit
def find_block(p_offsets, blocks, i_t):
    """The block that token i_t lies in: how many of the inner edges are <= i_t."""
    i_block = 0
    for i in range(1, blocks, 64):
        o_edge = i + tl.arange(0, 64)
        b_edge = tl.load(p_offsets + o_edge, mask=o_edge < blocks, other=0)
        i_block += tl.sum(((b_edge <= i_t) & (o_edge < blocks)).to(tl.int32), 0)
    return i_block


@triton.jit
def block_end(p_offsets, blocks, i_block, stop):
    """Where block i_block ends; the last one reaches to `stop`."""
    return tl.load(p_offsets + i_block + 1, mask=i_block + 1 < blocks, other=stop).to(tl.int32)


@triton.jit
def split_range(p_lengths, i_b, i_split, splits, BN: tl.constexpr):
    """[start, stop) of a split: an equal share of this sequence's own length, in whole tiles."""
    length = tl.load(p_lengths + i_b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    start = tl.minimum(i_split * share, length)
    return start, tl.minimum(start + share, length)


@triton.jit
def visible_tokens(p_mask, i_b, mask_width, o_t, m_t, HAS_MASK: tl.constexpr):
    """Which tokens of a tile the query sees: inside the sequence, and not masked."""
    if HAS_MASK:
        m_t = m_t & tl.load(p_mask + i_b.to(tl.int64) * mask_width + o_t, mask=m_t, other=0)
    return m_t


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
        # Reduced once behind the loop: Triton 3.6 fails on these reductions inside it.
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
        m_flat = b_width <= 0
        b_slope = 1 + (tau1 - tau2) / tl.where(m_flat, 1.0, b_width)
        b_slope = tl.where(m_flat, 1.0, tl.maximum(b_slope, SLOPE_FLOOR))
        b_delta = tl.where(m_none, 0.0, b_delta)
        b_offset = b_delta - tau2 - b_slope * b_delta
    return b_slope, b_offset


RUNTIME = [
    "sm_scale", "tau1", "tau2", "kv_heads", "mask_width", "splits", "first_split", "all_splits",
    "range_splits", "k_batch_rows", "k_head_rows", "k_blocks", "v_batch_rows", "v_head_rows",
    "v_blocks",
]  # fmt: skip
RANGE_RUNTIME = [
    "sm_scale", "kv_heads", "mask_width", "splits", "first_split", "all_splits", "k_batch_rows",
    "k_head_rows", "k_blocks",
]  # fmt: skip


@triton.jit(do_not_specialize=RANGE_RUNTIME)
def score_range_kernel(
    p_q, p_k, p_k_scale, p_k_zero, p_k_offsets, p_lengths, p_mask, p_ranges, sm_scale, kv_heads,
    mask_width, splits, first_split, all_splits, k_batch_rows, k_head_rows, k_blocks,
    G: tl.constexpr, HP: tl.constexpr, HAS_MASK: tl.constexpr, K_KIND: tl.constexpr,
    K_D: tl.constexpr, K_BITS: tl.constexpr, K_COLUMNS: tl.constexpr, K_GROUP: tl.constexpr,
    K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
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
    i_kb = 0
    if K_KIND == "block":
        p_k_offsets += i_b.to(tl.int64) * (k_blocks + 1)
        i_kb = find_block(p_k_offsets, k_blocks, i_t)
    b_low = tl.full((HP,), float("inf"), tl.float32)
    b_high = tl.full((HP,), float("-inf"), tl.float32)
    while i_t < stop:
        end = stop
        if K_KIND == "block":
            k_end = block_end(p_k_offsets, k_blocks, i_kb, stop)
            end = tl.minimum(end, k_end)
        i_param = i_bh.to(tl.int64) * k_blocks + i_kb
        b_operand, b_factor, b_offset = fold_query(
            p_q, p_k_scale, p_k_zero, o_row, m_h, i_param, K_KIND, K_D, K_BITS, K_COLUMNS, K_PAD,
            UNIT, HP, DT,
        )  # fmt: skip
        for i in range(i_t, end, BN):
            o_t = i + tl.arange(0, BN)
            m_t = o_t < end
            b_s = tile_scores(
                b_operand, b_factor, b_offset, p_k, p_k_scale, p_k_zero, i_k + o_t, m_t, K_KIND,
                K_D, K_BITS, K_COLUMNS, K_GROUP, K_WIDTH, K_PAD, HP, BN, DT, PRECISION,
            )  # fmt: skip
            m_seen = visible_tokens(p_mask, i_b, mask_width, o_t, m_t, HAS_MASK)[None, :]
            b_low = tl.minimum(b_low, tl.min(tl.where(m_seen, b_s, float("inf")), 1))
            b_high = tl.maximum(b_high, tl.max(tl.where(m_seen, b_s, float("-inf")), 1))
        i_t = end
        if K_KIND == "block":
            i_kb += (k_end <= end).to(tl.int32)
    p_out = p_ranges + (o_row * all_splits + first_split + i_split) * 2
    tl.store(p_out, b_low * sm_scale, mask=m_h)
    tl.store(p_out + 1, b_high * sm_scale, mask=m_h)


@triton.jit(do_not_specialize=RUNTIME)
def segment_kernel(
    p_q, p_k, p_k_scale, p_k_zero, p_k_offsets, p_v, p_v_scale, p_v_zero, p_v_offsets, p_lengths,
    p_mask, p_ranges, p_out, p_lse, sm_scale, tau1, tau2, kv_heads, mask_width, splits,
    first_split, all_splits, range_splits, k_batch_rows, k_head_rows, k_blocks, v_batch_rows,
    v_head_rows, v_blocks,
    G: tl.constexpr, HP: tl.constexpr, HAS_MASK: tl.constexpr, CALIBRATE: tl.constexpr,
    K_KIND: tl.constexpr, K_D: tl.constexpr, K_BITS: tl.constexpr, K_COLUMNS: tl.constexpr,
    K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_KIND: tl.constexpr,
    V_D: tl.constexpr, V_BITS: tl.constexpr, V_COLUMNS: tl.constexpr, V_GROUP: tl.constexpr,
    V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one kv head's q rows over one split of a segment.

    Program (batch * kv_heads, splits) writes p_out [batch * q_heads, all_splits, V_D] and p_lse
    [batch * q_heads, all_splits] (log2; -inf where it sees no key) at split first_split + i_split.
    It walks stretches of tokens that share their blocks of K and of V, and each stretch in tiles
    of BN tokens with a running maximum. Reference: `reference._partial`.
    """
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // kv_heads, i_bh % kv_heads
    o_h = tl.arange(0, HP)
    m_h = o_h < G
    o_row = i_bh.to(tl.int64) * G + o_h
    b_slope, b_bias = calibration_map(p_ranges, o_row, m_h, tau1, tau2, range_splits, HP, CALIBRATE)
    b_slope, b_bias = b_slope * (sm_scale * LOG2E), b_bias * LOG2E
    i_k = i_b.to(tl.int64) * k_batch_rows + i_h.to(tl.int64) * k_head_rows
    i_v = i_b.to(tl.int64) * v_batch_rows + i_h.to(tl.int64) * v_head_rows
    i_t, stop = split_range(p_lengths, i_b, i_split, splits, BN)
    i_kb, i_vb = 0, 0
    if K_KIND == "block":
        p_k_offsets += i_b.to(tl.int64) * (k_blocks + 1)
        i_kb = find_block(p_k_offsets, k_blocks, i_t)
    if V_KIND == "block":
        p_v_offsets += i_b.to(tl.int64) * (v_blocks + 1)
        i_vb = find_block(p_v_offsets, v_blocks, i_t)
    SHIFT: tl.constexpr = HALF_SHIFT if (V_KIND == "block" and DT == tl.float16) else 0.0
    V_SLOTS: tl.constexpr = 8 // V_BITS
    b_top = tl.full((HP,), float("-inf"), tl.float32)
    b_sum = tl.zeros((HP,), tl.float32)
    b_shared = tl.zeros((HP,), tl.float32)
    b_acc = ()
    for _ in tl.static_range(V_SLOTS):
        b_acc = b_acc + (tl.zeros((HP, V_PAD), tl.float32),)
    while i_t < stop:
        end = stop
        if K_KIND == "block":
            k_end = block_end(p_k_offsets, k_blocks, i_kb, stop)
            end = tl.minimum(end, k_end)
        if V_KIND == "block":
            v_end = block_end(p_v_offsets, v_blocks, i_vb, stop)
            end = tl.minimum(end, v_end)
        i_kp = i_bh.to(tl.int64) * k_blocks + i_kb
        i_vp = i_bh.to(tl.int64) * v_blocks + i_vb
        b_q, b_factor, b_offset = fold_query(
            p_q, p_k_scale, p_k_zero, o_row, m_h, i_kp, K_KIND, K_D, K_BITS, K_COLUMNS, K_PAD,
            UNIT, HP, DT,
        )  # fmt: skip
        if V_KIND == "block":
            b_acc = enter_block(
                b_acc, p_v_scale, p_v_zero, i_vp, V_D, V_BITS, V_COLUMNS, V_PAD, UNIT
            )
        b_part = tl.zeros((HP,), tl.float32)
        for i in range(i_t, end, BN):
            o_t = i + tl.arange(0, BN)
            m_t = o_t < end
            b_s = tile_scores(
                b_q, b_factor, b_offset, p_k, p_k_scale, p_k_zero, i_k + o_t, m_t, K_KIND, K_D,
                K_BITS, K_COLUMNS, K_GROUP, K_WIDTH, K_PAD, HP, BN, DT, PRECISION,
            )  # fmt: skip
            b_s = b_s * b_slope[:, None] + b_bias[:, None]
            m_seen = visible_tokens(p_mask, i_b, mask_width, o_t, m_t, HAS_MASK)
            b_s = tl.where(m_seen[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_top, tl.max(b_s, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp2(b_s - (b_base - SHIFT)[:, None])
            b_alpha = tl.exp2(b_top - b_base)
            b_sum = b_sum * b_alpha
            b_part = b_part * b_alpha + tl.sum(b_p, 1)
            b_acc, b_shared = tile_values(
                b_p, b_acc, b_shared, b_alpha, p_v, p_v_scale, p_v_zero, i_v + o_t, m_t, V_KIND,
                V_D, V_BITS, V_COLUMNS, V_GROUP, V_WIDTH, V_PAD, BN, DT, PRECISION,
            )  # fmt: skip
            b_top = b_new
        b_sum += b_part
        if V_KIND == "block":
            b_acc = leave_block(
                b_acc, b_part, p_v_scale, p_v_zero, i_vp, V_D, V_BITS, V_COLUMNS, V_PAD, UNIT
            )
        i_t = end
        if K_KIND == "block":
            i_kb += (k_end <= end).to(tl.int32)
        if V_KIND == "block":
            i_vb += (v_end <= end).to(tl.int32)
    m_none = b_sum == 0
    b_total = tl.where(m_none, 1.0, b_sum)
    o_part = o_row * all_splits + first_split + i_split
    b_lse = tl.where(m_none, float("-inf"), b_top + tl.log2(b_total) - SHIFT)
    tl.store(p_lse + o_part, b_lse, mask=m_h)
    for slot in tl.static_range(V_SLOTS):
        o_d = tl.arange(0, V_PAD) * V_SLOTS + slot
        b_out = b_acc[slot]
        if V_KIND == "token":
            b_out = b_out * (UNIT / (1 << plane_shift(V_BITS, slot))) + b_shared[:, None]
        m_out = m_h[:, None] & (o_d < V_D)[None, :]
        p_slot = p_out + o_part[:, None] * V_D + o_d[None, :]
        tl.store(p_slot, b_out * (1.0 / b_total)[:, None], mask=m_out)


@triton.jit(do_not_specialize=["all_splits"])
def merge_kernel(
    p_out, p_lse, p_result, all_splits, V_D: tl.constexpr, V_PAD: tl.constexpr, BS: tl.constexpr
):
    """Join the partials of all splits of all segments: `merge.merge_partials`, in log2.

    Program (batch * q_heads) reads p_out [rows, all_splits, V_D] and p_lse [rows, all_splits] and
    writes p_result [rows, V_D]: 0 where no key is visible.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, V_PAD)
    b_top = tl.full((1,), float("-inf"), tl.float32)
    b_sum = tl.zeros((1,), tl.float32)
    b_acc = tl.zeros((V_PAD,), tl.float32)
    for i in range(0, all_splits, BS):
        o_split = i + tl.arange(0, BS)
        b_lse = tl.load(
            p_lse + i_row * all_splits + o_split, mask=o_split < all_splits, other=float("-inf")
        )
        m_part = (b_lse > float("-inf"))[:, None] & (o_d < V_D)[None, :]
        p_part = p_out + (i_row * all_splits + o_split[:, None]) * V_D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_part, other=0)
        b_new = tl.maximum(b_top, tl.max(b_lse, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_lse - b_base)
        b_alpha = tl.exp2(b_top - b_base)
        b_acc = b_acc * b_alpha + tl.sum(b_part * b_weight[:, None], 0)
        b_sum = b_sum * b_alpha + tl.sum(b_weight, 0)
        b_top = b_new
    b_acc = b_acc / tl.where(b_sum == 0, 1.0, b_sum)
    tl.store(p_result + i_row * V_D + o_d, b_acc, mask=o_d < V_D)
