"""Tokens of the dense store in 8-bit floats: half the bytes of 16-bit windows, and one more.

A head's K (or V) of a token is a row of bytes: its numbers in e4m3, then the exponent of their
scale, a power of two, in e8m0 as OCP MX has it. The scale is the least by which no number exceeds
448, e4m3's largest, so none is cut off. A number is rounded to 4 significant bits, at worst by 1 in
16 of itself or, where it is below 2^-14 of the row's largest, by 2^-17 of that one.
One tensor holds numbers and scale, so whatever moves, saves or counts tokens does so with both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.quant import CacheSpec
from duotone.quant.spec import SCALE_BYTES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# What rows of numbers and their scale are to torch, which can gather, join and scatter bytes.
ROWS = torch.uint8
# Of e8m0 bytes: 2^0, and the least and the largest scale, whose products with e4m3 fp32 can hold.
BIAS, LEAST, MOST = 127, 27, 247
# The exponent of 256, and what carries a fraction above 1.75 = 448 / 256 into an fp32's exponent.
TOP_EXPONENT, ABOVE_TOP = 8, 0x1FFFFF
FRACTION_BITS = 23


def dense_dtype(spec: CacheSpec, dtype: torch.dtype) -> torch.dtype:
    """Return what a cache keeps dense tokens in: the model's type, or `ROWS`.

    dtype: the model's.
    """
    return dtype if spec.dense_dtype == "model" else ROWS


def kept_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [..., channels] in `dtype`, rounded to nearest.

    `ROWS`: [..., channels + 1] bytes. A number that is infinite, or none, becomes none. What rounds
    to no number of x's own type becomes the largest of 4 bits that it has. `FP8`: without a scale,
    as kernels can write it; no cache asks for that, for it is cut off at `LARGEST`.
    """
    if dtype == ROWS and x.dtype != ROWS:
        return _rows(x)
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 and x.dtype != FP8 else x.to(dtype)


def read_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of x in `dtype`, [..., channels] also of `ROWS`; exact in fp32."""
    if x.dtype != ROWS:
        return x.to(dtype)
    numbers = x[..., :-SCALE_BYTES].contiguous().view(FP8).float()
    return (numbers * _power(x[..., -SCALE_BYTES:])).to(dtype)


def channels_of(x: Tensor) -> int:
    """Return how many numbers a row of K or V has."""
    return x.shape[-1] - (SCALE_BYTES if x.dtype == ROWS else 0)


def row_width(spec: CacheSpec, head_dim: int) -> int:
    """Return how many elements the dense store keeps of a token and head."""
    return head_dim + (SCALE_BYTES if spec.dense_dtype != "model" else 0)


def as_stored(x: Tensor, spec: CacheSpec) -> Tensor:
    """Return what a decode step reads of dense K or V behind it: x after its round trip."""
    return read_as(kept_as(x, dense_dtype(spec, x.dtype)), x.dtype)


def as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as integers, which torch can gather and scatter; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _rows(x: Tensor) -> Tensor:
    top = _largest(x.dtype)
    numbers = x.masked_fill(x.isinf(), torch.nan).clamp(-top, top).type(torch.float32)
    largest = numbers.abs().amax(-1, keepdim=True)
    exponent = ((largest.view(torch.int32) + ABOVE_TOP) >> FRACTION_BITS) - TOP_EXPONENT
    scale = exponent.clamp(LEAST, MOST)
    codes = (numbers * _power(2 * BIAS - scale)).to(FP8)
    return torch.cat([codes.view(ROWS), scale.to(ROWS)], -1)


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number of 4 significant bits in `dtype`; in float64, in float32."""
    exponent = 15 if dtype == torch.float16 else 127
    return 1.875 * 2.0**exponent


def _power(byte: Tensor) -> Tensor:
    """2^(byte - BIAS) in fp32, exactly: the bits of the number, not a function of it."""
    return (byte.int() << FRACTION_BITS).view(torch.float32)
