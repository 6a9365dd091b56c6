"""Layout of codes in a row of bytes: equal bits, or classes of channels one after the other.

A *place* is a channel's rank in the packed order (`quant.classes`; with equal bits the channel
itself). Every class fills whole bytes; 80 channels with 5 of 4 bits, 20 of 2, 20 of 1, 35 of none:

    byte      0     1     2   |  3  ...   7    |   8       9       10
    places   0 1   2 3   4 -  | 5-8 ... 21-24  | 25-32   33-40   41-44 ----    45-79 have no code

Slot s of a byte is again the s-th of its codes. A tile of bytes is masked once per slot as with
equal bits. Here the mask is a vector over the bytes, and some bytes lack a slot.

CLASSES holds the numbers of channels with 8, 4, 2 and 1 bits, in nine binary digits each (at most
256 channels). 0: all channels have BITS. BITS is the narrowest width with codes: SLOTS = 8 / BITS.
"""

# Constants of Triton are upper case.
# ruff: noqa: SIM300

import triton
import triton.language as tl

from duotone.attention.triton.family import HONOURS
from duotone.attention.triton.parameters import load_parameters, lowest_level

WIDTHS = HONOURS.bits
COUNT_DIGITS = 9


def encode_classes(counts):
    """CLASSES of [(bits, channels)]; classes of 0 bits have no codes and are left out."""
    return sum(n << (COUNT_DIGITS * WIDTHS.index(bits)) for bits, n in counts if bits)


@triton.constexpr_function
def first_place(CLASSES, i):
    """Channels of wider codes than the i-th width: its first place. i = 4: all coded channels."""
    return sum((CLASSES >> (9 * k)) & 511 for k in range(i))


@triton.constexpr_function
def first_byte(CLASSES, i):
    """Bytes of wider codes than the i-th width: its first byte. i = 4: bytes of a row."""
    return sum((((CLASSES >> (9 * k)) & 511) * (8 >> k) + 7) // 8 for k in range(i))


@triton.jit
def by_width(b_bits, x8, x4, x2, x1):
    """Select, of four numbers, the one that belongs to each width."""
    return tl.where(b_bits == 8, x8, tl.where(b_bits == 4, x4, tl.where(b_bits == 2, x2, x1)))


@triton.jit
def width_before(o_x, end8, end4, end2):
    """Width of each place or byte, from the ends of the widths."""
    return tl.where(o_x < end8, 8, tl.where(o_x < end4, 4, tl.where(o_x < end2, 2, 1)))


@triton.jit
def byte_bits(o_byte, CLASSES: tl.constexpr):
    """Bits of each code in the bytes o_byte of a row of classes."""
    return width_before(
        o_byte, first_byte(CLASSES, 1), first_byte(CLASSES, 2), first_byte(CLASSES, 3)
    )


@triton.jit
def class_starts(b_bits, CLASSES: tl.constexpr):
    """(first place, first byte) of the class of each width in b_bits."""
    b_place = by_width(
        b_bits, 0, first_place(CLASSES, 1), first_place(CLASSES, 2), first_place(CLASSES, 3)
    )
    b_byte = by_width(
        b_bits, 0, first_byte(CLASSES, 1), first_byte(CLASSES, 2), first_byte(CLASSES, 3)
    )
    return b_place, b_byte


@triton.jit
def slot_places(
    D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, PAD: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """(place of the code at SLOT of each byte, whether it is there, its weight 2**shift): [PAD]."""
    o_byte = tl.arange(0, PAD)
    if CLASSES == 0:
        o_place = o_byte * (8 // BITS) + SLOT
        m_place = o_place < D
        b_weight = tl.full((PAD,), 1 << (8 - BITS * (1 + SLOT)), tl.int32)
    else:
        b_bits = byte_bits(o_byte, CLASSES)
        b_place, b_byte = class_starts(b_bits, CLASSES)
        b_end = by_width(
            b_bits, first_place(CLASSES, 1), first_place(CLASSES, 2), first_place(CLASSES, 3),
            first_place(CLASSES, 4),
        )  # fmt: skip
        b_codes = 8 // b_bits
        o_place = b_place + (o_byte - b_byte) * b_codes + SLOT
        m_place = (SLOT < b_codes) & (o_place < b_end)
        b_weight = 1 << tl.maximum(8 - b_bits * (1 + SLOT), 0)
    return o_place, m_place, b_weight.to(tl.float32)


@triton.jit
def place_bits(o_place, BITS: tl.constexpr, CLASSES: tl.constexpr):
    """Width of the code of each place; any width where there is none."""
    if CLASSES == 0:
        b_bits = tl.full(o_place.shape, BITS, tl.int32)
    else:
        b_bits = width_before(
            o_place, first_place(CLASSES, 1), first_place(CLASSES, 2), first_place(CLASSES, 3)
        )
    return b_bits


@triton.jit
def place_codes(o_place, D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr):
    """(slot, byte, weight 2**shift, has a code) of each place: the inverse of `slot_places`."""
    b_bits = place_bits(o_place, BITS, CLASSES)
    if CLASSES == 0:
        o_within, o_byte, m_code = o_place, tl.zeros_like(o_place), o_place < D
    else:
        b_place, o_byte = class_starts(b_bits, CLASSES)
        o_within = o_place - b_place
        m_code = o_place < first_place(CLASSES, 4)
    b_codes = 8 // b_bits
    o_slot = o_within % b_codes
    b_weight = 1 << (8 - b_bits * (1 + o_slot))
    return o_slot, o_byte + o_within // b_codes, b_weight.to(tl.float32), m_code


@triton.jit
def class_mask(CLASSES: tl.constexpr, PAD: tl.constexpr, SLOT: tl.constexpr):
    """Mask of the code at SLOT of each byte of a row of classes: [PAD] uint8.

    Where a byte has no such slot, the mask covers another code: q is 0 there, and no output is
    read.
    """
    b_bits = byte_bits(tl.arange(0, PAD), CLASSES)
    return (((1 << b_bits) - 1) << tl.maximum(8 - b_bits * (1 + SLOT), 0)).to(tl.uint8)


@triton.jit
def channel_places(p_numbers, i_row, D: tl.constexpr, D_PAD: tl.constexpr):
    """Place of each channel of a block, from its packed class numbers: [D_PAD].

    p_numbers: [rows, ceil(D / 4)], 2 bits per channel. Channels past D have no place (D). Whatever
    the numbers are, the places of channels below D are a permutation of 0 .. D - 1.
    """
    o_c = tl.arange(0, D_PAD)
    m_c = o_c < D
    b_byte = tl.load(p_numbers + i_row * ((D + 3) // 4) + o_c // 4, mask=m_c, other=0).to(tl.int32)
    b_class = (b_byte >> (6 - 2 * (o_c % 4))) & 3
    # Counters of the classes 0, 1, 2 in one number; the last class is the rest.
    b_one = tl.where(m_c & (b_class < 3), 1 << (10 * tl.minimum(b_class, 2)), 0)
    b_before = tl.cumsum(b_one, 0) - b_one
    b_all = tl.sum(b_one, 0)
    n0, n1, n2 = b_all & 1023, (b_all >> 10) & 1023, b_all >> 20
    before0, before1, before2 = b_before & 1023, (b_before >> 10) & 1023, b_before >> 20
    o_last = n0 + n1 + n2 + o_c - before0 - before1 - before2
    o_place = tl.where(b_class == 2, n0 + n1 + before2, o_last)
    o_place = tl.where(b_class == 1, n0 + before1, o_place)
    o_place = tl.where(b_class == 0, before0, o_place)
    return tl.where(m_c, o_place, D)


@triton.jit
def merge_output(p_out, b_out, b_keep, b_inverse, m_out):
    """Set output to output * keep + b_out * inverse; keep is 0 where there is no output yet."""
    b_old = tl.load(p_out, mask=m_out & (b_keep > 0)[:, None], other=0)
    tl.store(p_out, b_old * b_keep[:, None] + b_out * b_inverse[:, None], mask=m_out)


@triton.jit
def leave_classes(
    b_acc, b_part, b_keep, b_inverse, p_out, o_part, m_h, p_scale, p_zero, p_order,
    i_param, D: tl.constexpr, BITS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add one block's sums, which are in its packed order, to the output in channel order.

    b_acc: p @ plane, [HP, PAD] per slot. b_part [HP]: the block's sum of p, for its zero_points.
    p_out [.., D]: the output so far, normalised. keep, inverse [HP]: weights of old and new output.
    Each block has an order of its own, so registers cannot hold the sum over blocks.
    """
    # Wait for the writes of other threads of this program for the previous block.
    tl.debug_barrier()
    p_row = p_out + o_part[:, None] * D
    for slot in tl.static_range(8 // BITS):
        o_place, m_place, b_weight = slot_places(D, BITS, CLASSES, PAD, slot)
        b_scale = load_parameters(p_scale, i_param, o_place, m_place, COLUMNS, False)
        b_zero = load_parameters(p_zero, i_param, o_place, m_place, D, True)
        b_zero = lowest_level(b_zero, b_scale, place_bits(o_place, BITS, CLASSES), p_scale)
        o_c = tl.load(p_order + i_param * D + o_place, mask=m_place, other=0).to(tl.int32)
        b_unit = b_scale * (UNIT / b_weight)
        b_out = b_acc[slot] * b_unit[None, :] + b_part[:, None] * b_zero[None, :]
        m_out = m_h[:, None] & m_place[None, :]
        merge_output(p_row + o_c[None, :], b_out, b_keep, b_inverse, m_out)
    if COLUMNS < D:
        o_place = COLUMNS + tl.arange(0, triton.next_power_of_2(D - COLUMNS))
        b_zero = load_parameters(p_zero, i_param, o_place, o_place < D, D, True)
        o_c = tl.load(p_order + i_param * D + o_place, mask=o_place < D, other=0).to(tl.int32)
        m_out = m_h[:, None] & (o_place < D)[None, :]
        b_out = b_part[:, None] * b_zero[None, :]
        merge_output(p_row + o_c[None, :], b_out, b_keep, b_inverse, m_out)
