"""Scales and zero-points in Triton: numbers, or rows of 8 bits (`quant.small_floats`).

Bytes stand for 8 bits: the type of a pointer tells which one its rows are. With them zero-points
are stored as the middle of the levels.
"""

# Constants of Triton are upper case.

import triton
import triton.language as tl


@triton.jit
def load_parameters(
    p_rows, o_row, o_column, m_x, COLUMNS: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    """Load parameters as fp32, 0 where masked: o_row and o_column, broadcast.

    COLUMNS: parameters of a row. SIGNED: zero-points.
    """
    if p_rows.dtype.element_ty == tl.uint8:
        o_first = o_row * (COLUMNS + 1) + o_column * 0
        b_first = tl.load(p_rows + o_first, mask=m_x, other=0).to(tl.int32)
        b_code = tl.load(p_rows + o_first + 1 + o_column, mask=m_x, other=0).to(tl.int32)
        b_half = b_code << 6
        if SIGNED:
            b_half = ((b_code & 128) << 8) | ((b_code & 127) << 6)
        b_half = b_half.to(tl.uint16).to(tl.float16, bitcast=True)
        b_x = b_half.to(tl.float32) * (b_first << 23).to(tl.float32, bitcast=True)
    else:
        b_x = tl.load(p_rows + o_row * COLUMNS + o_column, mask=m_x, other=0).to(tl.float32)
    return b_x


@triton.jit
def lowest_level(b_zero, b_scale, b_bits, p_rows):
    """Zero-points from what `load_parameters` loaded for them and from scales, of any form.

    b_bits: widths of the codes. p_rows: pointer to scales.
    """
    if p_rows.dtype.element_ty == tl.uint8:
        b_zero = b_zero - b_scale * (((1 << b_bits) - 1) * 0.5)
    return b_zero
