"""Tiles of packed tokens in registers: scores against K, sums of V, straight from canonical bytes.

They read canonical bytes (`quant.packing`) and never reorder them. A tile of bytes is masked once
per *slot*: the codes at the same place of every byte are a matrix of their own, with the channels

    slot + SLOTS * byte,    SLOTS = 8 / bits codes per byte,

(unequal bits: `triton_classes`), so q, scales and outputs come as tuples with an entry per slot,
and each slot is a small product.
Codes are masked but not shifted down: the code of a slot is worth 2**shift, which is folded into q
(K) and into the output (V). For fp16 products the masked byte *is* the operand: its bits read as a
subnormal fp16 are the integer times 2**-24, exact in the matrix units (`UNIT` undoes it), so
nothing is converted.

How a tensor is stored (`KIND`):
    dense   values in 16 or 32 bit
    block   a scale per channel (or one) for each block of tokens: folded into q
            (`triton_prepare.fold_kernel`) and the output; bits may differ by channel
    token   one scale per token: multiplies its score (K), its probability (V)
    group   a scale per token and channel group: multiplies the tile in registers

Names: i_ indices, o_ index vectors, p_ pointers, b_ values in registers, m_ masks.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: RUF005, SIM300

import triton
import triton.language as tl

from duotone.attention.triton_classes import class_mask
from duotone.attention.triton_prepare import HALF_TOP, TINY

# Scales below this count as it: a constant channel has scale 0, and accumulators are divided by it.
UNIT_FLOOR = tl.constexpr(1e-20)


@triton.jit
def plane_shift(BITS: tl.constexpr, SLOT: tl.constexpr):
    """How far left in its byte the code of a slot lies."""
    return 8 - BITS * (1 + SLOT)


@triton.jit
def load_rows(
    p_x, o_row, m_row, WIDTH: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr
):
    """Rows o_row of a [rows, WIDTH] tensor, zeros where masked: [tokens, PAD] or [PAD, tokens]."""
    o_c = tl.expand_dims(tl.arange(0, PAD), 1 - CHANNEL_AXIS)
    m_tile = tl.expand_dims(m_row, CHANNEL_AXIS)
    if PAD != WIDTH:
        m_tile = m_tile & (o_c < WIDTH)
    return tl.load(p_x + tl.expand_dims(o_row, CHANNEL_AXIS) * WIDTH + o_c, mask=m_tile, other=0)


@triton.jit
def plane(
    b_x, KIND: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, SLOT: tl.constexpr,
    PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One slot of a tile of bytes: code * 2**shift / UNIT (dense: the values themselves)."""
    if KIND != "dense":
        if CLASSES == 0:
            b_x = b_x & (((1 << BITS) - 1) << plane_shift(BITS, SLOT))
        else:
            b_x = b_x & tl.expand_dims(class_mask(CLASSES, PAD, SLOT), 1 - CHANNEL_AXIS)
        if DT == tl.float16:
            b_x = b_x.to(tl.uint16).to(tl.float16, bitcast=True)
    return b_x.to(DT)


@triton.jit
def group_norm(
    p_scale, p_zero, o_row, m_row, BITS: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """A bound of |x_hat| of each token, which keeps fp16 tiles in range: [BN] (1 but for fp16)."""
    if DT == tl.float16:
        PAD: tl.constexpr = triton.next_power_of_2(COLUMNS)
        b_scale = load_rows(p_scale, o_row, m_row, COLUMNS, PAD, 1).to(tl.float32)
        b_zero = load_rows(p_zero, o_row, m_row, COLUMNS, PAD, 1).to(tl.float32)
        b_bound = tl.abs(b_scale) * ((1 << BITS) - 1) + tl.abs(b_zero)
        b_norm = tl.maximum(tl.max(b_bound, 1), TINY)
    else:
        b_norm = tl.full((BN,), 1.0, tl.float32)
    return b_norm


@triton.jit
def load_group_params(
    p_scale, p_zero, o_row, m_row, b_norm, D: tl.constexpr, BITS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """(scale, zero_point) / norm of each byte's code at SLOT, of the shape of the tile of bytes."""
    o_channel = tl.expand_dims(tl.arange(0, PAD) * (8 // BITS) + SLOT, 1 - CHANNEL_AXIS)
    o_param = tl.expand_dims(o_row, CHANNEL_AXIS) * COLUMNS + o_channel // GROUP
    m_param = tl.expand_dims(m_row, CHANNEL_AXIS) & (o_channel < D)
    b_norm = tl.expand_dims(b_norm, CHANNEL_AXIS)
    b_scale = tl.load(p_scale + o_param, mask=m_param, other=0).to(tl.float32)
    b_zero = tl.load(p_zero + o_param, mask=m_param, other=0).to(tl.float32)
    b_inverse = 1.0 / b_norm
    return b_scale * b_inverse, b_zero * b_inverse


@triton.jit
def group_planes(
    b_x, p_scale, p_zero, o_row, m_row, b_norm, D: tl.constexpr, BITS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """x_hat / norm of a tile of bytes, one entry per slot."""
    SLOTS: tl.constexpr = 8 // BITS
    # Where a byte never straddles two groups, its slots share their parameters.
    SHARED: tl.constexpr = GROUP % SLOTS == 0
    b_scale, b_zero = load_group_params(
        p_scale, p_zero, o_row, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS, 0
    )
    b_planes = ()
    for slot in tl.static_range(SLOTS):
        if slot > 0 and not SHARED:
            b_scale, b_zero = load_group_params(
                p_scale, p_zero, o_row, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS,
                slot,
            )  # fmt: skip
        b_codes = (b_x >> plane_shift(BITS, slot)) & ((1 << BITS) - 1)
        b_planes = b_planes + ((b_codes.to(tl.float32) * b_scale + b_zero).to(DT),)
    return b_planes


@triton.jit
def load_block_params(
    p_scale, p_zero, i_row, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    PAD: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """(scale, zero_point) [PAD] of one block at the channels of SLOT; zeros at padding."""
    o_d = tl.arange(0, PAD) * (8 // BITS) + SLOT
    o_param = i_row * COLUMNS + o_d % COLUMNS
    b_scale = tl.load(p_scale + o_param, mask=o_d < D, other=0).to(tl.float32)
    b_zero = tl.load(p_zero + o_param, mask=o_d < D, other=0).to(tl.float32)
    return b_scale, b_zero


@triton.jit
def load_query(
    p_q, o_row, m_h, KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """q at SLOT's channels with plane weights folded in: [HP, PAD]."""
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

    q . x = factor * sum(operand . plane), without sm_scale; for KIND "token" the offset is what the
    token's zero_point multiplies, sum(q). fp16 operands are normalised per row.
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
    """(operands, factor, offset) of a block as `triton_prepare.fold_kernel` left them."""
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
    b_q, b_factor, b_offset, p_k, p_scale, p_zero, o_row, m_row, KIND: tl.constexpr,
    D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, HP: tl.constexpr,
    BN: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k_hat of a tile of tokens: [HP, BN], without sm_scale."""
    SLOTS: tl.constexpr = 8 // BITS
    b_x = load_rows(p_k, o_row, m_row, WIDTH, PAD, 0)
    b_s = tl.zeros((HP, BN), tl.float32)
    if KIND == "group":
        b_norm = group_norm(p_scale, p_zero, o_row, m_row, BITS, COLUMNS, BN, DT)
        b_planes = group_planes(
            b_x, p_scale, p_zero, o_row, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, 0, DT
        )
        for slot in tl.static_range(SLOTS):
            b_s = tl.dot(b_q[slot], b_planes[slot], b_s, input_precision=PRECISION)
        b_s = b_s * b_norm[None, :]
    else:
        for slot in tl.static_range(SLOTS):
            b_k = plane(b_x, KIND, BITS, CLASSES, slot, PAD, 0, DT)
            b_s = tl.dot(b_q[slot], b_k, b_s, input_precision=PRECISION)
    b_s = b_s * b_factor[:, None]
    if KIND == "token":
        b_scale = tl.load(p_scale + o_row, mask=m_row, other=0).to(tl.float32)
        b_zero = tl.load(p_zero + o_row, mask=m_row, other=0).to(tl.float32)
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
    b_p, b_acc, b_shared, b_alpha, p_v, p_scale, p_zero, o_row, m_row, KIND: tl.constexpr,
    D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulators after a tile: acc * alpha + p @ tile, [HP, PAD] per slot.

    For KIND "token", b_shared [HP] takes p . zero_point. Where a scale per token multiplies p, the
    product is normalised per tile: it may exceed fp16.
    """
    SLOTS: tl.constexpr = 8 // BITS
    b_x = load_rows(p_v, o_row, m_row, WIDTH, PAD, 1)
    b_new = ()
    if KIND == "block" or KIND == "dense":
        b_w = b_p.to(DT)
        for slot in tl.static_range(SLOTS):
            b_v = plane(b_x, KIND, BITS, CLASSES, slot, PAD, 1, DT)
            b_old = b_acc[slot] * b_alpha[:, None]
            b_new = b_new + (tl.dot(b_w, b_v, b_old, input_precision=PRECISION),)
    if KIND == "token":
        b_scale = tl.load(p_scale + o_row, mask=m_row, other=0).to(tl.float32)
        b_zero = tl.load(p_zero + o_row, mask=m_row, other=0).to(tl.float32)
        b_shared = b_shared * b_alpha + tl.sum(b_p * b_zero[None, :], 1)
        b_w, b_factor = to_half(b_p * b_scale[None, :], DT)
        for slot in tl.static_range(SLOTS):
            b_v = plane(b_x, KIND, BITS, CLASSES, slot, PAD, 1, DT)
            b_sum = tl.dot(b_w, b_v, input_precision=PRECISION) * b_factor[:, None]
            b_new = b_new + (b_acc[slot] * b_alpha[:, None] + b_sum,)
    if KIND == "group":
        b_norm = group_norm(p_scale, p_zero, o_row, m_row, BITS, COLUMNS, BN, DT)
        b_planes = group_planes(
            b_x, p_scale, p_zero, o_row, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, 1, DT
        )
        b_w, b_factor = to_half(b_p * b_norm[None, :], DT)
        for slot in tl.static_range(SLOTS):
            b_sum = tl.dot(b_w, b_planes[slot], input_precision=PRECISION) * b_factor[:, None]
            b_new = b_new + (b_acc[slot] * b_alpha[:, None] + b_sum,)
    return b_new, b_shared


@triton.jit
def enter_block(
    b_acc, p_scale, p_zero, i_param, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Accumulators in units of the block's scales: what `leave_block` undoes."""
    b_new = ()
    for slot in tl.static_range(8 // BITS):
        b_scale, _ = load_block_params(p_scale, p_zero, i_param, D, BITS, COLUMNS, PAD, slot)
        b_unit = block_unit(b_scale, BITS, slot, UNIT)
        b_new = b_new + (b_acc[slot] * (1.0 / b_unit)[None, :],)
    return b_new


@triton.jit
def leave_block(
    b_acc, b_part, p_scale, p_zero, i_param, D: tl.constexpr, BITS: tl.constexpr,
    COLUMNS: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Accumulators as outputs again, with the block's zero_points for its sum of p, b_part [HP]."""
    b_new = ()
    for slot in tl.static_range(8 // BITS):
        b_scale, b_zero = load_block_params(p_scale, p_zero, i_param, D, BITS, COLUMNS, PAD, slot)
        b_unit = block_unit(b_scale, BITS, slot, UNIT)
        b_new = b_new + (b_acc[slot] * b_unit[None, :] + b_part[:, None] * b_zero[None, :],)
    return b_new


@triton.jit
def block_unit(b_scale, BITS: tl.constexpr, SLOT: tl.constexpr, UNIT: tl.constexpr):
    """What one unit of a plane is worth: never 0, so that accumulators can be divided by it."""
    b_scale = tl.where(tl.abs(b_scale) < UNIT_FLOOR, UNIT_FLOOR, b_scale)
    return b_scale * (UNIT / (1 << plane_shift(BITS, SLOT)))
