"""Sign-and-magnitude codes in Triton: signs for tiles of codes, zero_points out of shared slots.

In addition to its codes, kernels know a tensor by one tuple of pointers,

    at = (scale, zero_point, signs, modes, offsets of blocks)       None where there is none

    asymmetric            zero_point
    symmetric             signs: a plane, one bit per code, a row per token
    hybrid with slots     signs: the slots; modes: a bit per group (`quant.slots`)
    hybrid without        zero_point, and signs: a plane, 0 in asymmetric groups

so a kernel is compiled for the parts that exist. Signs come as *units* of 8 bits, or of 32 where
rows (or slots) are whole words. Element i of a row is bit (i % unit) ^ 7 of unit i // unit in both:
words are little-endian and bytes are not. A group of 32 is one word: one load, a shift per code.

where = (row of the block's parameters, first token of the block) names the block of tokens of a
tile. Names are as in `triton.tiles`.
"""

# Constants of Triton are upper case.
# ruff: noqa: SIM300

import triton
import triton.language as tl

from duotone.attention.triton.parameters import load_parameters


@triton.constexpr_function
def slot_units(GROUP, PARAM_BITS, UNIT_BITS):
    """Units of one slot: `quant.slots.slot_bytes`."""
    return max(PARAM_BITS // 8, (GROUP + 7) // 8) * 8 // UNIT_BITS


@triton.constexpr_function
def one_word(param_type, slot_type, GROUP):
    """True where each slot is one 32-bit word. slot_type: None where there are no slots."""
    if slot_type is None or slot_type.element_ty.primitive_bitwidth != 32:
        return False
    return max(param_type.element_ty.primitive_bitwidth // 8, (GROUP + 7) // 8) == 4


@triton.constexpr_function
def plane_units(D, UNIT_BITS):
    """Units of one token's row in a plane of signs."""
    return (D + 7) // 8 * 8 // UNIT_BITS


@triton.constexpr_function
def element_bits(pointer_type):
    """Bits of an element of a pointer type."""
    return pointer_type.element_ty.primitive_bitwidth


@triton.jit
def load_modes(p_modes, o_row, o_column, m_x, COLUMNS: tl.constexpr):
    """Load modes: True where groups are symmetric; False where masked."""
    WIDTH: tl.constexpr = (COLUMNS + 7) // 8
    b_byte = tl.load(p_modes + o_row * WIDTH + o_column // 8, mask=m_x, other=0).to(tl.int32)
    return ((b_byte >> (7 - o_column % 8)) & 1) != 0


@triton.jit
def load_zero(at, o_row, o_column, m_x, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Load zero_points of groups as fp32, 0 where masked: o_row and o_column, broadcast.

    COLUMNS: groups in a row of parameters. GROUP: elements of a group, for tensors with slots.
    """
    p_scale, p_zero, p_signs, p_modes, _ = at
    o_group = o_row * COLUMNS + o_column
    if p_zero is not None:
        b_zero = load_parameters(p_zero, o_row, o_column, m_x, COLUMNS, True)
    elif p_modes is None:
        b_zero = tl.zeros_like(o_group).to(tl.float32)
    else:
        m_zero = m_x & (load_modes(p_modes, o_row, o_column, m_x, COLUMNS) == 0)
        b_word = load_param_word(p_signs, p_scale, o_group, m_zero, GROUP)
        # Slots of symmetric groups hold no number, and were not loaded.
        b_zero = param_of_word(b_word, p_scale)
    return b_zero


@triton.jit
def param_of_word(b_word, p_scale):
    """Parameter in the low bits of an int32, of the type that p_scale points at, as fp32."""
    if p_scale.dtype.element_ty == tl.float16:
        b_param = b_word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif p_scale.dtype.element_ty == tl.bfloat16:
        b_param = (b_word << 16).to(tl.float32, bitcast=True)
    else:
        b_param = b_word.to(tl.float32, bitcast=True)
    return b_param


@triton.jit
def load_param_word(p_slots, p_scale, o_group, m_x, GROUP: tl.constexpr):
    """Load the first bytes of slots, which hold a parameter, as int32; 0 where masked."""
    UNIT_BITS: tl.constexpr = element_bits(p_slots.dtype)
    PARAM_BITS: tl.constexpr = element_bits(p_scale.dtype)
    p_slots += o_group * slot_units(GROUP, PARAM_BITS, UNIT_BITS)
    b_word = tl.load(p_slots, mask=m_x, other=0).to(tl.int32)
    for i in tl.static_range(1, PARAM_BITS // UNIT_BITS):
        b_unit = tl.load(p_slots + i, mask=m_x, other=0).to(tl.int32)
        b_word = b_word | (b_unit << (UNIT_BITS * i))
    return b_word


@triton.jit
def block_start(at, i_block, KIND: tl.constexpr):
    """First token of block i_block, where signs are counted from it; else 0."""
    p_modes, p_offsets = at[3], at[4]
    i_start = 0
    if KIND == "block" and p_modes is not None:
        i_start = tl.load(p_offsets + i_block).to(tl.int32)
    return i_start


@triton.jit
def load_signs(
    at, where, o_row, o_t, m_t, KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Load the unit that holds the sign of the code at SLOT of each byte; 0 in asymmetric groups.

    o_row, o_t, m_t [tokens]: rows of the tensor, places in the sequence, mask of tokens that exist.
    The result has the shape of a tile of bytes, or one token where all tokens share a unit.
    """
    p_scale, _, p_signs, p_modes, _ = at
    UNIT_BITS: tl.constexpr = element_bits(p_signs.dtype)
    WIDTH: tl.constexpr = slot_units(GROUP, element_bits(p_scale.dtype), UNIT_BITS)
    o_c = tl.expand_dims(tl.arange(0, PAD) * (8 // BITS) + SLOT, 1 - CHANNEL_AXIS)
    o_row = tl.expand_dims(o_row, CHANNEL_AXIS)
    m_tile = tl.expand_dims(m_t, CHANNEL_AXIS) & (o_c < D)
    if p_modes is None:
        o_unit = o_row * plane_units(D, UNIT_BITS) + o_c // UNIT_BITS
        b_units = tl.load(p_signs + o_unit, mask=m_tile, other=0)
    elif KIND == "block":
        i_param, i_start = where
        m_mode = load_modes(p_modes, i_param, o_c, o_c < D, D)
        o_unit = (i_param * D + o_c) * WIDTH
        if GROUP <= UNIT_BITS:
            b_units = tl.load(p_signs + o_unit, mask=m_mode, other=0)
        else:
            o_place = tl.expand_dims(o_t - i_start, CHANNEL_AXIS)
            o_unit = o_unit + o_place // UNIT_BITS
            b_units = tl.load(p_signs + o_unit, mask=m_tile & m_mode, other=0)
    else:
        m_mode = load_modes(p_modes, o_row, o_c // GROUP, m_tile, COLUMNS)
        o_unit = (o_row * COLUMNS + o_c // GROUP) * WIDTH + o_c % GROUP // UNIT_BITS
        b_units = tl.load(p_signs + o_unit, mask=m_mode, other=0)
    return b_units.to(tl.int32)


@triton.jit
def load_zero_and_signs(
    at, o_row, o_t, m_t, D: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """(`load_zero`, `load_signs`) of groups along channels, of the shape of a tile of bytes.

    Where a slot is one word, each is loaded once for both. Without signs the second is the first.
    """
    o_c = tl.expand_dims(tl.arange(0, PAD) * (8 // BITS) + SLOT, 1 - CHANNEL_AXIS)
    o_line = tl.expand_dims(o_row, CHANNEL_AXIS)
    m_tile = tl.expand_dims(m_t, CHANNEL_AXIS) & (o_c < D)
    WORDS: tl.constexpr = one_word(at[0].dtype, None if at[3] is None else at[2].dtype, GROUP)
    if WORDS:
        m_mode = load_modes(at[3], o_line, o_c // GROUP, m_tile, COLUMNS)
        b_word = tl.load(at[2] + o_line * COLUMNS + o_c // GROUP, mask=m_tile, other=0)
        b_zero = param_of_word(tl.where(m_mode, 0, b_word), at[0])
        b_units = tl.where(m_mode, b_word, 0)
    else:
        b_zero = load_zero(at, o_line, o_c // GROUP, m_tile, COLUMNS, GROUP)
        b_units = b_zero
        if at[2] is not None:
            b_units = load_signs(
                at, (0, 0), o_row, o_t, m_t, "group", D, BITS, COLUMNS, GROUP, PAD, CHANNEL_AXIS,
                SLOT,
            )  # fmt: skip
    return b_zero, b_units


@triton.jit
def code_signs(
    b_units, at, where, o_t, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PAD: tl.constexpr, CHANNEL_AXIS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Make an int32 whose top bit is set where the code at SLOT of each byte is negative.

    b_units: as from `load_signs`. The lower bits are arbitrary.
    """
    p_signs, p_modes = at[2], at[3]
    if KIND == "block" and p_modes is not None:
        o_place = tl.expand_dims(o_t - where[1], CHANNEL_AXIS)
    else:
        o_place = tl.expand_dims(tl.arange(0, PAD) * (8 // BITS) + SLOT, 1 - CHANNEL_AXIS)
        if p_modes is not None:
            o_place = o_place % GROUP
    return b_units << (31 - ((o_place % element_bits(p_signs.dtype)) ^ 7))


@triton.jit
def with_signs(b_x, b_sign, DT: tl.constexpr):
    """Set the signs of `code_signs` in b_x >= 0, by bits, since fp16 values are subnormal."""
    if DT == tl.float16:
        b_sign = (b_sign >> 16).to(tl.uint16) & 0x8000
        b_bits = b_x.to(tl.uint16, bitcast=True) | b_sign
    else:
        b_bits = b_x.to(tl.int32, bitcast=True) | (b_sign & -0x80000000)
    return b_bits.to(DT, bitcast=True)
