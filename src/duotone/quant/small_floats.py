"""Scales and middles of levels in 8 bits: floats with 4 bits of mantissa, an exponent per row.

A row has the parameters of one block of tokens. It begins with the exponent that they share:

    byte      0            1            2
    scale   |  e  |  E E E E M M M M  | ...        no sign; negative scales become 0
    middle  |  e  |  S E E E M M M M  | ...

    value = half(bits) * 2 ** (e - 127)
    zero_point = middle - scale * top / 2,  top: the largest code

Half of the levels lie above the middle. The lowest level may be many steps from it: rounding that
one to 4 bits would cost more.

half(bits) is an fp16 number. E are the last bits of its exponent (0: subnormal). M are the first
ones of its mantissa, and all other bits are 0. A kernel shifts a byte by 6 and multiplies. e = 255
stands for a row that is not finite. The shared exponents follow the microscaling formats
(arXiv 2310.10537). Elements there have 3 bits of mantissa at most.

The largest number of a row lies in the top binade. A row reaches over 15 binades (scale) or 7
(middle), and further with equal steps. Shared exponents have a least value, at which the smallest
step is that of fp16: all values are fp16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

MANTISSA = 4
MOST = 15  # the largest exponent of fp16
NOT_FINITE = 255
# By name, the type of parameters as numbers.
PARAM_TYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8": torch.float16,
}


@dataclass(frozen=True)
class SmallFloat:
    """Format of the bytes. exponent: its bits."""

    exponent: int
    signed: bool

    @property
    def binades(self) -> int:
        """Binades between the lowest normal number and the largest one."""
        return 2**self.exponent - 2

    @property
    def least(self) -> int:
        """The least exponent that a row shares: its smallest step is that of fp16."""
        return self.binades + MANTISSA - 24

    @property
    def bias(self) -> int:
        """Stored exponent of a row whose largest number lies in [1, 2)."""
        return 127 + MOST - (2**self.exponent - 1)


SCALE = SmallFloat(4, signed=False)
MIDDLE = SmallFloat(3, signed=True)


def to_bytes(x: Float[Tensor, "*b n"], form: SmallFloat) -> UInt8[Tensor, "*b n1"]:
    """Round rows to 8 bits, half to even; numbers above the largest become the largest."""
    x = x.to(torch.float32)
    size = x.abs() if form.signed else x.clamp_min(0)
    top = size.amax(-1, keepdim=True)
    shared = _exponent(top).clamp(form.least, MOST)
    lowest = shared - form.binades
    exponent = torch.maximum(_exponent(size), lowest)
    steps = (size * _power(MANTISSA - exponent)).round()
    codes = ((exponent - lowest) * 2**MANTISSA + steps).nan_to_num(0)
    codes = codes.clamp_max(127 if form.signed else 255)
    if form.signed:
        codes = codes + 128 * ((x < 0) & (codes > 0))
    first = torch.where(top.isfinite(), shared + form.bias, NOT_FINITE)
    return torch.cat([first.to(torch.uint8), codes.to(torch.uint8)], -1)


def from_bytes(rows: UInt8[Tensor, "*b n1"], form: SmallFloat) -> Float[Tensor, "*b n"]:
    """Inverse of `to_bytes`, in fp16: exact, but not finite where a row is not."""
    first, codes = rows[..., :1], rows[..., 1:]
    size = codes & 127 if form.signed else codes
    halves = (size.to(torch.int16) << 10 - MANTISSA).view(torch.float16).float()
    if form.signed:
        halves = torch.where(codes > 127, -halves, halves)
    return (halves * (first.to(torch.int32) << 23).view(torch.float32)).half()


def small_levels(
    scale: Float[Tensor, "*b coded"],
    zero_point: Float[Tensor, "*b n"],
    top: Float[Tensor, "*#b n"] | int,
) -> tuple[UInt8[Tensor, "*b coded1"], UInt8[Tensor, "*b n1"]]:
    """Rows of scales and middles. top: the largest codes.

    The first zero-points belong to scales, the others to channels without codes.
    """
    middle = zero_point.float() + _half_widths(scale, zero_point, top)
    return to_bytes(scale, SCALE), to_bytes(middle, MIDDLE)


def lowest_levels(
    scale: Float[Tensor, "*b coded"],
    middle: Float[Tensor, "*b n"],
    top: Float[Tensor, "*#b n"] | int,
) -> Float[Tensor, "*b n"]:
    """Zero-points of rounded scales and middles, in fp32. top: as for `small_levels`.

    Products are exact: a kernel that fuses both operations finds the same number.
    """
    return middle.float() - _half_widths(scale, middle, top)


def _half_widths(scale: Tensor, like: Tensor, top: Tensor | int) -> Tensor:
    """Distance from the lowest level to the middle; 0 without codes."""
    return F.pad(scale.float(), (0, like.shape[-1] - scale.shape[-1])) * (top / 2)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2(x)) of numbers >= 0; below all others at 0."""
    return (x.contiguous().view(torch.int32) >> 23) - 127


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
