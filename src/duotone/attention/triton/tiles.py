"""Tiles of packed tokens in registers: scores against K, sums of V, straight from canonical bytes.

Kernels read canonical bytes (`quant.packing`) and never reorder them. A tile of bytes is masked
once per *slot*. The codes at one place of every byte are a matrix of their own, with the channels

    slot + SLOTS * byte,    SLOTS = 8 / bits codes per byte

(unequal bits: `triton.classes`). q, scales and outputs are tuples with an entry per slot, and each
slot is a small product.
Codes are masked but not shifted down: the code of a slot counts 2**shift. This factor is folded
into q (K) and into the output (V). For fp16 products the masked byte *is* the operand. Its bits,
read as a subnormal fp16, are the integer times 2**-24, exact in the matrix units (`UNIT` undoes the
factor). No conversion is needed.

A tensor is stored in one of four ways (`KIND`):

    dense   values in 16 or 32 bit
    block   a scale per channel (or one) for each block of tokens: folded into q
            (`triton.prepare.fold_kernel`) and the output; bits may differ by channel
    token   one scale per token: multiplies its score (K), its probability (V)
    group   a scale per token and channel group: multiplies the tile in registers

Parameters and signs come as the tuples `at` and `where` of `triton.signs`.
Names: i_ indices, o_ index vectors, p_ pointers, b_ values in registers, m_ masks.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: RUF005, SIM300

import triton
import triton.language as tl

from duotone.attention.triton.parameters import load_parameters, lowest_level
from duotone.attention.triton.planes import (
    group_norm,
    group_planes,
    load_rows,
    plane_shift,
    signed_plane,
)
from duotone.attention.triton.prepare import HALF_TOP, TINY
from duotone.attention.triton.signs import load_zero

# Scales below this count as it: a constant channel has scale 0, and accumulators are divided by it.
UNIT_FLOOR = tl.constexpr(1e-20)


@triton.jit
def load_block_params(
    at, i_row, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PAD: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """(scale, zero_point) [PAD] of one block at the channels of SLOT; zeros at padding."""
    o_d = tl.arange(0, PAD) * (8 // BITS) + SLOT
    b_scale = load_parameters(at[0], i_row, o_d % COLUMNS, o_d < D, COLUMNS, False)
    b_zero = load_zero(at, i_row, o_d % COLUMNS, o_d < D, COLUMNS, GROUP)
    return b_scale, lowest_level(b_zero, b_scale, BITS, at[0])


@triton.jit
def load_query(
    p_q, o_row, m_h, KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Load q at SLOT's channels, with plane weights folded in: [HP, PAD]."""
    o_d = tl.arange(0, PAD) * (8 // BITS) + SLOT
    m_tile = m_h[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + o_row[:, None] * D + o_d[None, :], mask=m_tile, other=0).to(tl.float32)
    if KIND == "token":
        b_q = b_q * (1.0 / (1 << plane_shift(BITS, SLOT)))
    return b_q


@triton.jit
def query_operands(
    p_q, o_row, m_h, KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr,
    UNIT: tl.constexpr, HP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """(operands, factor, offset) where no scales are folded in: for every KIND but "block".

    q . x = factor * sum(operand . plane), without sm_scale. For KIND "token" the offset is sum(q),
    the factor of the token's zero_point. fp16 operands are normalised per row.
    """
    SLOTS: tl.constexpr = 8 // BITS
    b_factor = tl.full((HP,), 1.0, tl.float32)
    b_offset = tl.zeros((HP,), tl.float32)
    b_norm = tl.full((HP,), TINY, tl.float32)
    for slot in tl.static_range(SLOTS):
        b_q = load_query(p_q, o_row, m_h, KIND, D, BITS, PAD, slot)
        b_norm = tl.maximum(b_norm, tl.max(tl.abs(b_q), 1))
        if KIND == "token":
            b_offset += tl.sum(b_q, 1) * (1 << plane_shift(BITS, slot))
    if DT == tl.float16:
        b_factor = b_norm / HALF_TOP
    b_inverse = 1.0 / b_factor
    b_operands = ()
    for slot in tl.static_range(SLOTS):
        b_q = load_query(p_q, o_row, m_h, KIND, D, BITS, PAD, slot)
        b_operands = b_operands + ((b_q * b_inverse[:, None]).to(DT),)
    if KIND == "token":
        b_factor = b_factor * UNIT
    return b_operands, b_factor, b_offset


@triton.jit
def load_fold(
    p_fold, p_affine, i_param, o_h, m_h, G: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr
):
    """(operands, factor, offset) of a block, as `triton.prepare.fold_kernel` wrote them."""
    SLOTS: tl.constexpr = 8 // BITS
    o_row = i_param * G + o_h
    b_operands = ()
    for slot in tl.static_range(SLOTS):
        p_slot = p_fold + o_row[:, None] * (SLOTS * PAD) + slot * PAD + tl.arange(0, PAD)[None, :]
        b_operands = b_operands + (tl.load(p_slot, mask=m_h[:, None], other=0),)
    b_factor = tl.load(p_affine + o_row * 2, mask=m_h, other=0)
    b_offset = tl.load(p_affine + o_row * 2 + 1, mask=m_h, other=0)
    return b_operands, b_factor, b_offset


@triton.jit
def tile_scores(
    b_q, b_factor, b_offset, p_k, at, where, i_k, o_t, m_t, KIND: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores q . k_hat of a tile of tokens: [HP, BN], without sm_scale.

    i_k: row of the sequence's first token. o_t, m_t [BN]: tokens of the sequence, and their mask.
    """
    SLOTS: tl.constexpr = 8 // BITS
    o_row = i_k + o_t
    b_x = load_rows(p_k, o_row, m_t, WIDTH, PAD, 0)
    b_s = tl.zeros((HP, BN), tl.float32)
    if KIND == "group":
        b_norm = group_norm(at, o_row, m_t, BITS, COLUMNS, GROUP, BN, DT)
        b_planes = group_planes(
            b_x, at, o_row, o_t, m_t, b_norm, D, BITS, COLUMNS, GROUP, PAD, 0, DT
        )
        for slot in tl.static_range(SLOTS):
            b_s = tl.dot(b_q[slot], b_planes[slot], b_s, input_precision=PRECISION)
        b_s = b_s * b_norm[None, :]
    else:
        b_units = b_x
        for slot in tl.static_range(SLOTS):
            b_k, b_units = signed_plane(
                b_x, b_units, at, where, o_row, o_t, m_t, KIND, D, BITS, CLASSES, COLUMNS, GROUP,
                PAD, 0, slot, DT,
            )  # fmt: skip
            b_s = tl.dot(b_q[slot], b_k, b_s, input_precision=PRECISION)
    b_s = b_s * b_factor[:, None]
    if KIND == "token":
        b_scale = tl.load(at[0] + o_row, mask=m_t, other=0).to(tl.float32)
        b_zero = load_zero(at, o_row, 0, m_t, COLUMNS, GROUP)
        b_s = b_s * b_scale[None, :] + b_offset[:, None] * b_zero[None, :]
    if KIND == "block":
        b_s = b_s + b_offset[:, None]
    return b_s


@triton.jit
def to_half(b_x, DT: tl.constexpr):
    """(x normalised per row, norm) for fp16, where x may be out of range; else (x, 1)."""
    if DT == tl.float16:
        b_norm = tl.maximum(tl.max(tl.abs(b_x), 1), TINY) / HALF_TOP
        b_x = b_x * (1.0 / b_norm)[:, None]
    else:
        b_norm = tl.full((b_x.shape[0],), 1.0, tl.float32)
    return b_x.to(DT), b_norm


@triton.jit
def tile_values(
    b_p, b_acc, b_shared, b_alpha, p_v, at, where, i_v, o_t, m_t, KIND: tl.constexpr,
    D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulators after a tile: acc * alpha + p @ tile, [HP, PAD] per slot.

    For KIND "token", b_shared [HP] takes p . zero_point. Where a scale per token multiplies p, the
    product is normalised per tile: it may exceed fp16.
    """
    SLOTS: tl.constexpr = 8 // BITS
    o_row = i_v + o_t
    b_x = load_rows(p_v, o_row, m_t, WIDTH, PAD, 1)
    b_new = ()
    if KIND == "group":
        b_norm = group_norm(at, o_row, m_t, BITS, COLUMNS, GROUP, BN, DT)
        b_planes = group_planes(
            b_x, at, o_row, o_t, m_t, b_norm, D, BITS, COLUMNS, GROUP, PAD, 1, DT
        )
        b_w, b_factor = to_half(b_p * b_norm[None, :], DT)
        for slot in tl.static_range(SLOTS):
            b_sum = tl.dot(b_w, b_planes[slot], input_precision=PRECISION) * b_factor[:, None]
            b_new = b_new + (b_acc[slot] * b_alpha[:, None] + b_sum,)
    else:
        b_w = b_p.to(DT)
        if KIND == "token":
            b_scale = tl.load(at[0] + o_row, mask=m_t, other=0).to(tl.float32)
            b_zero = load_zero(at, o_row, 0, m_t, COLUMNS, GROUP)
            b_shared = b_shared * b_alpha + tl.sum(b_p * b_zero[None, :], 1)
            b_w, b_factor = to_half(b_p * b_scale[None, :], DT)
        b_units = b_x
        for slot in tl.static_range(SLOTS):
            b_v, b_units = signed_plane(
                b_x, b_units, at, where, o_row, o_t, m_t, KIND, D, BITS, CLASSES, COLUMNS, GROUP,
                PAD, 1, slot, DT,
            )  # fmt: skip
            b_old = b_acc[slot] * b_alpha[:, None]
            if KIND == "token":
                b_sum = tl.dot(b_w, b_v, input_precision=PRECISION) * b_factor[:, None]
                b_new = b_new + (b_old + b_sum,)
            else:
                b_new = b_new + (tl.dot(b_w, b_v, b_old, input_precision=PRECISION),)
    return b_new, b_shared


@triton.jit
def enter_block(
    b_acc, at, i_param, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Convert accumulators to units of the block's scales; `leave_block` undoes this."""
    b_new = ()
    for slot in tl.static_range(8 // BITS):
        b_scale, _ = load_block_params(at, i_param, D, BITS, COLUMNS, GROUP, PAD, slot)
        b_unit = block_unit(b_scale, BITS, slot, UNIT)
        b_new = b_new + (b_acc[slot] * (1.0 / b_unit)[None, :],)
    return b_new


@triton.jit
def leave_block(
    b_acc, b_part, at, i_param, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Convert accumulators back to outputs; add zero_points times the block's sum of p, b_part."""
    b_new = ()
    for slot in tl.static_range(8 // BITS):
        b_scale, b_zero = load_block_params(at, i_param, D, BITS, COLUMNS, GROUP, PAD, slot)
        b_unit = block_unit(b_scale, BITS, slot, UNIT)
        b_new = b_new + (b_acc[slot] * b_unit[None, :] + b_part[:, None] * b_zero[None, :],)
    return b_new


@triton.jit
def block_unit(b_scale, BITS: tl.constexpr, SLOT: tl.constexpr, UNIT: tl.constexpr):
    """Value of one unit of a plane: never 0, so that accumulators can be divided by it."""
    b_scale = tl.where(tl.abs(b_scale) < UNIT_FLOOR, UNIT_FLOOR, b_scale)
    return b_scale * (UNIT / (1 << plane_shift(BITS, SLOT)))
