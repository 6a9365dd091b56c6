"""Triton kernels of decode attention: one segment's attention, merge of the partials.

A program takes one kv head of one sequence and one split of a segment's tokens. It walks the blocks
of V, in them the blocks of K, in them tiles; `triton.tiles` does the arithmetic of a tile. Short
blocks of K (K_TILES tiles at most) make one loop over tiles, whose loads run ahead across blocks.

Names: i_ indices, o_ index vectors, p_ pointers, b_ values in registers, m_ masks. Only head dims,
bits, groups and flags are constexpr, and integers are not specialized: a new length or batch
compiles no kernel.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: RUF005, SIM300

import triton
import triton.language as tl

from duotone.attention.triton.classes import leave_classes
from duotone.attention.triton.planes import plane_shift
from duotone.attention.triton.range import calibration_map
from duotone.attention.triton.signs import block_start
from duotone.attention.triton.tiles import (
    enter_block,
    leave_block,
    load_fold,
    query_operands,
    tile_scores,
    tile_values,
)
from duotone.attention.triton.walk import (
    block_end,
    block_tile,
    find_block,
    split_range,
    visible_tokens,
)

LOG2E = tl.constexpr(1.4426950408889634)
# Log2 of what the largest probability becomes in fp16 (block scales): small ones keep their bits.
HALF_SHIFT = tl.constexpr(12.0)


RUNTIME = [
    "sm_scale", "tau1", "tau2", "kv_heads", "mask_width", "splits", "first_split", "all_splits",
    "range_splits", "k_batch_rows", "k_head_rows", "k_blocks", "v_batch_rows", "v_head_rows",
    "v_blocks",
]  # fmt: skip


@triton.jit
def attend_tile(
    b_top, b_sum, b_part, b_shared, b_acc, b_q, b_factor, b_offset, b_slope, b_bias, p_k, k_at,
    k_where, p_v, v_at, v_where, p_mask, i_b, i_k, i_v, mask_width, first, end,
    HP: tl.constexpr, HAS_MASK: tl.constexpr, SHIFT: tl.constexpr, K_KIND: tl.constexpr,
    K_D: tl.constexpr, K_BITS: tl.constexpr, K_CLASSES: tl.constexpr, K_COLUMNS: tl.constexpr,
    K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_KIND: tl.constexpr,
    V_D: tl.constexpr, V_BITS: tl.constexpr, V_CLASSES: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_GROUP: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, BN: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running softmax by the tokens [first, end) of one tile, which share their blocks.

    top: maximum score (log2); sum, part: sums of p before this block of V and in it; acc, shared:
    sums of p * v (`tile_values`). All are relative to 2**top, p itself to 2**(top - SHIFT).
    """
    o_t = first + tl.arange(0, BN)
    m_t = o_t < end
    b_s = tile_scores(
        b_q, b_factor, b_offset, p_k, k_at, k_where, i_k, o_t, m_t, K_KIND, K_D, K_BITS, K_CLASSES,
        K_COLUMNS, K_GROUP, K_WIDTH, K_PAD, HP, BN, DT, PRECISION,
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
        b_p, b_acc, b_shared, b_alpha, p_v, v_at, v_where, i_v, o_t, m_t, V_KIND, V_D, V_BITS,
        V_CLASSES, V_COLUMNS, V_GROUP, V_WIDTH, V_PAD, BN, DT, PRECISION,
    )  # fmt: skip
    return b_new, b_sum, b_part, b_shared, b_acc


@triton.jit
def empty_sums(HP: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr):
    """Zero accumulators of V, [HP, PAD] per slot."""
    b_acc = ()
    for _ in tl.static_range(8 // BITS):
        b_acc = b_acc + (tl.zeros((HP, PAD), tl.float32),)
    return b_acc


@triton.jit
def safe_inverse(b_x):
    """Inverse 1 / x, and 1 where x is 0."""
    return 1.0 / tl.where(b_x == 0, 1.0, b_x)


@triton.jit(do_not_specialize=RUNTIME)
def segment_kernel(
    p_q, p_k, p_k_scale, p_k_zero, p_k_signs, p_k_modes, p_k_fold, p_k_affine, p_k_offsets, p_v,
    p_v_scale, p_v_zero, p_v_signs, p_v_modes, p_v_order, p_v_offsets, p_lengths, p_mask, p_ranges,
    p_out, p_lse, sm_scale, tau1, tau2, kv_heads, mask_width, splits, first_split, all_splits,
    range_splits, k_batch_rows, k_head_rows, k_blocks, v_batch_rows, v_head_rows, v_blocks,
    G: tl.constexpr, HP: tl.constexpr, HAS_MASK: tl.constexpr, CALIBRATE: tl.constexpr,
    K_KIND: tl.constexpr, K_D: tl.constexpr, K_BITS: tl.constexpr, K_CLASSES: tl.constexpr,
    K_COLUMNS: tl.constexpr, K_GROUP: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr,
    K_TILES: tl.constexpr, V_KIND: tl.constexpr, V_D: tl.constexpr, V_BITS: tl.constexpr,
    V_CLASSES: tl.constexpr, V_COLUMNS: tl.constexpr, V_GROUP: tl.constexpr, V_WIDTH: tl.constexpr,
    V_PAD: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one kv head's q rows over one split of a segment.

    Program (batch * kv_heads, splits) writes p_out [batch * q_heads, all_splits, V_D] and p_lse
    [batch * q_heads, all_splits] (log2; -inf where it sees no key) at split first_split + i_split.
    With classes of channels in V, p_out is written on leaving each of their blocks.
    Reference: `reference._partial`.
    """
    i_bh, i_split = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // kv_heads, i_bh % kv_heads
    o_h = tl.arange(0, HP)
    m_h = o_h < G
    o_row = i_bh.to(tl.int64) * G + o_h
    o_part = o_row * all_splits + first_split + i_split
    b_slope, b_bias = calibration_map(p_ranges, o_row, m_h, tau1, tau2, range_splits, HP, CALIBRATE)
    b_slope, b_bias = b_slope * (sm_scale * LOG2E), b_bias * LOG2E
    i_k = i_b.to(tl.int64) * k_batch_rows + i_h.to(tl.int64) * k_head_rows
    i_v = i_b.to(tl.int64) * v_batch_rows + i_h.to(tl.int64) * v_head_rows
    i_t, stop = split_range(p_lengths, i_b, i_split, splits, BN)
    i_kp, i_vp = i_bh.to(tl.int64) * k_blocks, i_bh.to(tl.int64) * v_blocks
    if K_KIND == "block":
        p_k_offsets += i_b.to(tl.int64) * (k_blocks + 1)
    else:
        b_q, b_factor, b_offset = query_operands(
            p_q, o_row, m_h, K_KIND, K_D, K_BITS, K_PAD, UNIT, HP, DT
        )
    i_vb = 0
    if V_KIND == "block":
        p_v_offsets += i_b.to(tl.int64) * (v_blocks + 1)
        i_vb = find_block(p_v_offsets, v_blocks, i_t, V_GROUP)
    k_at = (p_k_scale, p_k_zero, p_k_signs, p_k_modes, p_k_offsets)
    v_at = (p_v_scale, p_v_zero, p_v_signs, p_v_modes, p_v_offsets)
    SHIFT: tl.constexpr = HALF_SHIFT if (V_KIND == "block" and DT == tl.float16) else 0.0
    b_top = tl.full((HP,), float("-inf"), tl.float32)
    b_sum = tl.zeros((HP,), tl.float32)
    b_shared = tl.zeros((HP,), tl.float32)
    b_acc = empty_sums(HP, V_BITS, V_PAD)
    while i_t < stop:
        v_stop = stop
        if V_KIND == "block":
            v_stop = tl.minimum(block_end(p_v_offsets, v_blocks, i_vb, stop), stop)
            if V_CLASSES == 0:
                b_acc = enter_block(
                    b_acc, v_at, i_vp + i_vb, V_D, V_BITS, V_COLUMNS, V_GROUP, V_PAD, UNIT
                )
            else:
                b_acc = empty_sums(HP, V_BITS, V_PAD)
        v_where = (i_vp + i_vb, block_start(v_at, i_vb, V_KIND))
        b_part = tl.zeros((HP,), tl.float32)
        i_kb = 0
        if K_KIND == "block":
            i_kb = find_block(p_k_offsets, k_blocks, i_t, K_GROUP)
        if K_TILES > 0:
            last = find_block(p_k_offsets, k_blocks, v_stop - 1, K_GROUP)
            for i in range((last + 1 - i_kb) * K_TILES):
                i_block = i_kb + i // K_TILES
                first, end = block_tile(
                    p_k_offsets, k_blocks, i_block, i % K_TILES, i_t, v_stop, BN
                )
                b_q, b_factor, b_offset = load_fold(
                    p_k_fold, p_k_affine, i_kp + i_block, o_h, m_h, G, K_BITS, K_PAD
                )
                k_where = (i_kp + i_block, block_start(k_at, i_block, K_KIND))
                b_top, b_sum, b_part, b_shared, b_acc = attend_tile(
                    b_top, b_sum, b_part, b_shared, b_acc, b_q, b_factor, b_offset, b_slope, b_bias,
                    p_k, k_at, k_where, p_v, v_at, v_where, p_mask, i_b, i_k, i_v,
                    mask_width, first, end, HP, HAS_MASK, SHIFT, K_KIND, K_D, K_BITS, K_CLASSES,
                    K_COLUMNS, K_GROUP, K_WIDTH, K_PAD, V_KIND, V_D, V_BITS, V_CLASSES, V_COLUMNS,
                    V_GROUP, V_WIDTH, V_PAD, BN, DT, PRECISION,
                )  # fmt: skip
        else:
            k_start = i_t
            while k_start < v_stop:
                end = v_stop
                if K_KIND == "block":
                    end = tl.minimum(block_end(p_k_offsets, k_blocks, i_kb, v_stop), v_stop)
                    b_q, b_factor, b_offset = load_fold(
                        p_k_fold, p_k_affine, i_kp + i_kb, o_h, m_h, G, K_BITS, K_PAD
                    )
                k_where = (i_kp + i_kb, block_start(k_at, i_kb, K_KIND))
                for i in range(k_start, end, BN):
                    b_top, b_sum, b_part, b_shared, b_acc = attend_tile(
                        b_top, b_sum, b_part, b_shared, b_acc, b_q, b_factor, b_offset, b_slope,
                        b_bias, p_k, k_at, k_where, p_v, v_at, v_where, p_mask, i_b,
                        i_k, i_v, mask_width, i, end, HP, HAS_MASK, SHIFT, K_KIND, K_D, K_BITS,
                        K_CLASSES, K_COLUMNS, K_GROUP, K_WIDTH, K_PAD, V_KIND, V_D, V_BITS,
                        V_CLASSES, V_COLUMNS, V_GROUP, V_WIDTH, V_PAD, BN, DT, PRECISION,
                    )  # fmt: skip
                k_start = end
                i_kb += 1
        b_total = b_sum + b_part
        if V_KIND == "block":
            if V_CLASSES == 0:
                b_acc = leave_block(
                    b_acc, b_part, v_at, i_vp + i_vb, V_D, V_BITS, V_COLUMNS, V_GROUP, V_PAD, UNIT
                )
            else:
                b_inverse = safe_inverse(b_total)
                leave_classes(
                    b_acc, b_part, b_sum * b_inverse, b_inverse, p_out, o_part, m_h,
                    p_v_scale, p_v_zero, p_v_order, i_vp + i_vb, V_D, V_BITS, V_CLASSES, V_COLUMNS,
                    V_PAD, UNIT,
                )  # fmt: skip
        b_sum = b_total
        i_t = tl.maximum(i_t, v_stop)
        i_vb += 1
    m_none = b_sum == 0
    b_lse = b_top + tl.log2(tl.where(m_none, 1.0, b_sum)) - SHIFT
    tl.store(p_lse + o_part, tl.where(m_none, float("-inf"), b_lse), mask=m_h)
    if V_CLASSES == 0:
        b_inverse = safe_inverse(b_sum)
        for slot in tl.static_range(8 // V_BITS):
            o_d = tl.arange(0, V_PAD) * (8 // V_BITS) + slot
            b_out = b_acc[slot]
            if V_KIND == "token":
                b_out = b_out * (UNIT / (1 << plane_shift(V_BITS, slot))) + b_shared[:, None]
            m_out = m_h[:, None] & (o_d < V_D)[None, :]
            p_slot = p_out + o_part[:, None] * V_D + o_d[None, :]
            tl.store(p_slot, b_out * b_inverse[:, None], mask=m_out)


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
