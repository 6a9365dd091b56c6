"""Tiles of canonical bytes as operands of products: one matrix per slot (see `triton.tiles`).

Codes that share their scales with a row or a column stay as they are, times 2**shift. Codes of
groups along channels become finished numbers. Names are as in `triton.tiles`.
"""

# Triton has no starred tuples, and its constants are upper case.
# ruff: noqa: RUF005, SIM300

import triton
import triton.language as tl

from duotone.attention.triton.classes import class_mask
from duotone.attention.triton.prepare import TINY
from duotone.attention.triton.signs import (
    code_signs,
    load_signs,
    load_zero,
    load_zero_and_signs,
    with_signs,
)


@triton.jit
def plane_shift(BITS: tl.constexpr, SLOT: tl.constexpr):
    """Left shift of the code of a slot in its byte."""
    return 8 - BITS * (1 + SLOT)


@triton.jit
def load_rows(
    p_x, o_row, m_row, WIDTH: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr
):
    """Load rows o_row of [rows, WIDTH], zeros where masked: [tokens, PAD] or [PAD, tokens]."""
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
def signed_plane(
    b_x, b_units, at, where, o_row, o_t, m_t, KIND: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr, SLOT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """(`plane` with signs, units of signs for the next slot, which may share them)."""
    b_plane = plane(b_x, KIND, BITS, CLASSES, SLOT, PAD, CHANNEL_AXIS, DT)
    if at[2] is not None:
        # In slots of blocks each channel has units of its own.
        if SLOT == 0 or (KIND == "block" and at[3] is not None):
            b_units = load_signs(
                at, where, o_row, o_t, m_t, KIND, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS, SLOT
            )
        b_sign = code_signs(b_units, at, where, o_t, KIND, BITS, GROUP, PAD, CHANNEL_AXIS, SLOT)
        b_plane = with_signs(b_plane, b_sign, DT)
    return b_plane, b_units


@triton.jit
def group_norm(
    at, o_row, m_row, BITS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Bound of |x_hat| of each token, which keeps fp16 tiles in range: [BN] (1 except for fp16)."""
    if DT == tl.float16:
        PAD: tl.constexpr = triton.next_power_of_2(COLUMNS)
        b_scale = load_rows(at[0], o_row, m_row, COLUMNS, PAD, 1).to(tl.float32)
        o_c = tl.arange(0, PAD)[None, :]
        m_c = m_row[:, None] & (o_c < COLUMNS)
        b_zero = load_zero(at, o_row[:, None], o_c, m_c, COLUMNS, GROUP)
        b_bound = tl.abs(b_scale) * ((1 << BITS) - 1) + tl.abs(b_zero)
        b_norm = tl.maximum(tl.max(b_bound, 1), TINY)
    else:
        b_norm = tl.full((BN,), 1.0, tl.float32)
    return b_norm


@triton.jit
def load_group_params(
    at, o_row, o_t, m_row, b_norm, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """(scale / norm, zero_point / norm, units of signs) of each byte's code at SLOT."""
    o_channel = tl.expand_dims(tl.arange(0, PAD) * (8 // BITS) + SLOT, 1 - CHANNEL_AXIS)
    o_param = tl.expand_dims(o_row, CHANNEL_AXIS) * COLUMNS + o_channel // GROUP
    m_param = tl.expand_dims(m_row, CHANNEL_AXIS) & (o_channel < D)
    b_scale = tl.load(at[0] + o_param, mask=m_param, other=0).to(tl.float32)
    b_zero, b_units = load_zero_and_signs(
        at, o_row, o_t, m_row, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS, SLOT
    )
    b_inverse = 1.0 / tl.expand_dims(b_norm, CHANNEL_AXIS)
    return b_scale * b_inverse, b_zero * b_inverse, b_units


@triton.jit
def group_planes(
    b_x, at, o_row, o_t, m_row, b_norm, D: tl.constexpr, BITS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Values x_hat / norm of a tile of bytes, one entry per slot."""
    SLOTS: tl.constexpr = 8 // BITS
    # Where a byte never straddles two groups, its slots share their parameters.
    SHARED: tl.constexpr = GROUP % SLOTS == 0
    b_scale, b_zero, b_units = load_group_params(
        at, o_row, o_t, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS, 0
    )
    b_planes = ()
    for slot in tl.static_range(SLOTS):
        if slot > 0 and not SHARED:
            b_scale, b_zero, b_units = load_group_params(
                at, o_row, o_t, m_row, b_norm, D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS, slot
            )
        b_codes = ((b_x >> plane_shift(BITS, slot)) & ((1 << BITS) - 1)).to(tl.float32)
        if at[2] is not None:
            b_sign = code_signs(
                b_units, at, (0, 0), o_t, "group", BITS, GROUP, PAD, CHANNEL_AXIS, slot
            )
            b_codes = with_signs(b_codes, b_sign, tl.float32)
        b_planes = b_planes + ((b_codes * b_scale + b_zero).to(DT),)
    return b_planes
