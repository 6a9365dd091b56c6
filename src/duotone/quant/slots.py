"""Shared slots of hybrid groups: either the zero_point of one mode or the signs of the other.

An asymmetric group needs a zero_point and no signs, a symmetric one signs and no zero_point. A
hybrid therefore keeps one slot of equal width per group, and one bit that names its content (InnerQ
sec. 4.2). The slot of a group of 32 with fp16 parameters has four bytes:

    mode 0, asymmetric      |  zero_point (fp16)  |   0   |   0   |
    mode 1, symmetric       | s0..s7  |  s8..s15  |s16-s23|s24-s31|     1: negative
    byte                         0         1          2       3

Byte j holds the signs of elements 8j..8j+7, the first in the top bit, as `packing` has them. So the
sign of element i is bit i ^ 7 of the little-endian word, and a kernel that has a group's word needs
one shift. A zero_point is in the machine's own byte order, as scales are. Unused bits are 0: the
last bytes of an asymmetric slot, and the signs of elements that a short last group lacks.

A group of n elements of b bits takes n * b (codes) + 16 (scale) + 8 * slot_bytes + 1 (mode)
bits: 2 + 49 / 32 bits per element for 32 of 2 bits. Two tensors, zero_points and a plane of
signs, would take 2 + (16 + 16 + 32 + 1) / 32. Modes are packed row by row into whole bytes.

Elements of a group are consecutive channels of a token, or consecutive tokens of a channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped, UInt8
from torch import Tensor

from duotone.quant.packing import pack, packed_bytes, unpack
from duotone.quant.spec import TensorSpec

PARAM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8": 1}
# Blocks of tokens may be cut short, and their slots stay as wide as the whole group's signs.
MAX_SLOT_TOKENS = 256

Slots = UInt8[Tensor, "*b groups slot_bytes"]


def has_slot(spec: TensorSpec) -> bool:
    """True where a tensor of this spec has shared slots.

    Hybrids need groups with a fixed, modest number of elements. Hybrids along the span, and along
    tokens without a group or with one above `MAX_SLOT_TOKENS`, have no slots. These hybrids store
    zero_points and a plane of signs separately.
    """
    if spec.mapping != "hybrid" or spec.along == "span":
        return False
    return spec.along == "channels" or (spec.group or MAX_SLOT_TOKENS + 1) <= MAX_SLOT_TOKENS


def group_elements(spec: TensorSpec, channels: int) -> int:
    """Number of elements of a whole group of a spec with slots."""
    return min(spec.group or channels, channels) if spec.along == "channels" else spec.group or 0


def slot_bytes(spec: TensorSpec, channels: int) -> int:
    """Width of a slot: bytes for the zero_point or for the signs of a whole group."""
    return max(PARAM_BYTES[spec.param_dtype], packed_bytes(group_elements(spec, channels), 1))


def fill_slots(
    zero_point: Float[Tensor, "*b groups"],
    negative: Bool[Tensor, "*b groups elements"],
    symmetric: Bool[Tensor, "*b groups"],
    width: int,
) -> Slots:
    """Fill the slots of groups. negative: signs group by group, at most 8 * width of each.

    Errors: signs that do not fit.
    """
    if negative.shape[-1] > 8 * width:
        raise ValueError(f"a slot of {width} bytes holds {8 * width} signs; got {negative.shape}.")
    value = zero_point.unsqueeze(-1).contiguous().view(torch.uint8)
    signs = pack(negative.byte(), 1)
    return torch.where(symmetric.unsqueeze(-1), _widen(signs, width), _widen(value, width))


def slot_zero_points(
    slots: Slots, symmetric: Bool[Tensor, "*b groups"], dtype: torch.dtype
) -> Float[Tensor, "*b groups"]:
    """Read zero_points: 0 in symmetric groups."""
    value = slots[..., : dtype.itemsize].contiguous().view(dtype).squeeze(-1)
    return value.masked_fill(symmetric, 0)


def slot_signs(
    slots: Slots, symmetric: Bool[Tensor, "*b groups"], elements: int
) -> Bool[Tensor, "*b groups {elements}"]:
    """True where an element is negative, in symmetric groups; False in asymmetric ones."""
    signs = unpack(slots[..., : packed_bytes(elements, 1)], 1, elements).bool()
    return signs & symmetric.unsqueeze(-1)


def _widen(x: Shaped[Tensor, "*b n"], width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))
