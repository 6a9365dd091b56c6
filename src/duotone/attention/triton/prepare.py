"""Triton kernels that run before attention: q folded into the blocks of K, channel orders of V.

Both are small per block. Inside attention they would cost most. A program would repeat them for
every block that it meets, with too few threads and no other work in flight.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: SIM300

import triton
import triton.language as tl

from duotone.attention.triton.classes import channel_places, place_bits, place_codes
from duotone.attention.triton.parameters import load_parameters, lowest_level
from duotone.attention.triton.signs import load_zero

# Operands of fp16 products are normalised to this: far from overflow, far from subnormals.
HALF_TOP = tl.constexpr(16384.0)
# The smallest divisor; operands below it are noise and vanish.
TINY = tl.constexpr(1e-30)


@triton.jit(do_not_specialize=["blocks", "kv_heads"])
def fold_kernel(
    p_q, p_scale, p_zero, p_signs, p_modes, p_numbers, p_offsets, p_fold, p_affine, blocks,
    kv_heads,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, OFFSETS: tl.constexpr, GROUP: tl.constexpr,
    PAD: tl.constexpr, UNIT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Fold one block's scales into q: q . k_hat = factor * sum(operand . plane) + offset.

    Program (batch * kv_heads * blocks) reads p_q [batch * q_heads, D], scale [rows, COLUMNS] and
    zero_point [rows, OFFSETS] (1 column or all; or their slots, or none). It writes p_fold
    [rows, G, SLOTS, PAD], an operand per slot, in the order of the block's bytes. It also writes
    p_affine [rows, G, 2] = (factor, offset), without sm_scale. fp16 operands are normalised per
    row: scales may be large.
    """
    i_param = tl.program_id(0).to(tl.int64)
    o_g, o_c = tl.arange(0, GP), tl.arange(0, D_PAD)
    m_tile = (o_g < G)[:, None] & (o_c < D)[None, :]
    i_bh = i_param // blocks
    o_q = i_bh * G + o_g
    b_q = tl.load(p_q + o_q[:, None] * D + o_c[None, :], mask=m_tile, other=0).to(tl.float32)
    o_place = o_c
    if CLASSES != 0:
        o_place = channel_places(p_numbers, i_param, D, D_PAD)
    o_slot, o_byte, b_weight, m_code = place_codes(o_place, D, BITS, CLASSES)
    # Parameters of an empty block may be anything, NaN included.
    p_offsets += (i_bh // kv_heads) * (blocks + 1) + i_param % blocks
    width = tl.where(tl.load(p_offsets) < tl.load(p_offsets + 1), D, 0)
    m_scale = m_code & (o_c < width)
    b_scale = load_parameters(p_scale, i_param, o_place % COLUMNS, m_scale, COLUMNS, False)
    at = (p_scale, p_zero, p_signs, p_modes, None)
    b_zero = load_zero(at, i_param, o_place % OFFSETS, o_c < width, OFFSETS, GROUP)
    b_zero = lowest_level(b_zero, b_scale, place_bits(o_place, BITS, CLASSES), p_scale)
    b_offset = tl.sum(b_q * b_zero[None, :], 1)
    b_q = b_q * (b_scale / b_weight)[None, :]
    b_factor = tl.full((GP,), 1.0, tl.float32)
    if DT == tl.float16:
        b_factor = tl.maximum(tl.max(tl.abs(b_q), 1), TINY) / HALF_TOP
    b_q = b_q * (1.0 / b_factor)[:, None]
    o_row = i_param * G + o_g
    ROW: tl.constexpr = (8 // BITS) * PAD
    p_row = p_fold + o_row[:, None] * ROW
    # Padding bytes, and slots that a byte of wide codes lacks, must be 0.
    m_row = (o_g < G)[:, None] & (tl.arange(0, ROW) >= 0)[None, :]
    tl.store(p_row + tl.arange(0, ROW)[None, :], tl.zeros((GP, ROW), DT), mask=m_row)
    tl.debug_barrier()
    o_code = o_slot * PAD + o_byte
    tl.store(p_row + o_code[None, :], b_q.to(DT), mask=m_tile & m_code[None, :])
    tl.store(p_affine + o_row * 2, b_factor * UNIT, mask=o_g < G)
    tl.store(p_affine + o_row * 2 + 1, b_offset, mask=o_g < G)


@triton.jit
def class_order_kernel(p_numbers, p_order, D: tl.constexpr, D_PAD: tl.constexpr):
    """`PackedTensor.channel_order` as bytes: program (rows) writes p_order [rows, D] uint8."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, D_PAD)
    o_place = channel_places(p_numbers, i_row, D, D_PAD)
    tl.store(p_order + i_row * D + o_place, o_c.to(tl.uint8), mask=o_c < D)
