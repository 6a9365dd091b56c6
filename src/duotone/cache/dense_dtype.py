"""Tokens of the dense store in 8-bit floats: half the bytes of 16-bit windows, and one more.

A head's K (or V) of a token is a row of bytes: its numbers in e4m3, then their scale, a power of
two. The scale is stored as its exponent, in e8m0 of OCP MX. It is the least by which no number
exceeds 448, e4m3's largest, so none is cut off. A number is rounded to 4 significant bits. The
error is at most 1/16 of the number, or, below 2^-14 of the row's largest number, 2^-17 of the
largest. One tensor holds numbers and scale, so code that moves, saves or counts tokens treats both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.quant import CacheSpec
from duotone.quant.spec import SCALE_BYTES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# Torch type of rows of numbers and their scale: torch can gather, join and scatter bytes.
ROWS = torch.uint8
# E8m0 bytes of 2^0 and of the least and largest scale whose products with e4m3 fit fp32.
BIAS, LEAST, MOST = 127, 27, 247
# The exponent of 256; the addend that carries a fraction above 1.75 = 448 / 256 into the exponent.
TOP_EXPONENT, ABOVE_TOP = 8, 0x1FFFFF
FRACTION_BITS = 23


def dense_dtype(spec: CacheSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the type that a cache keeps dense tokens in: the model's type, or `ROWS`.

    dtype: the model's.
    """
    return dtype if spec.dense_dtype == "model" else ROWS


def kept_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [..., channels] in `dtype`, rounded to nearest.

    `ROWS`: [..., channels + 1] bytes. Infinity and NaN become NaN. A number that would round above
    the range of x's type becomes the largest number of 4 significant bits in that type. `FP8`: no
    scale, as kernels can write it; no cache uses this type, which is cut off at `LARGEST`.
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
    """Return the number of channels of a row of K or V."""
    return x.shape[-1] - (SCALE_BYTES if x.dtype == ROWS else 0)


def row_width(spec: CacheSpec, head_dim: int) -> int:
    """Return the number of elements that the dense store keeps per token and head."""
    return head_dim + (SCALE_BYTES if spec.dense_dtype != "model" else 0)


def as_stored(x: Tensor, spec: CacheSpec) -> Tensor:
    """Return x after its round trip: the dense K or V that later decode steps read."""
    return read_as(kept_as(x, dense_dtype(spec, x.dtype)), x.dtype)


def as_bytes(x: Tensor) -> Tensor:
    """View 8-bit floats as integers, which torch can gather and scatter; keep other types."""
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
    """Return the largest number of 4 significant bits in `dtype`; float64 counts as float32."""
    exponent = 15 if dtype == torch.float16 else 127
    return 1.875 * 2.0**exponent


def _power(byte: Tensor) -> Tensor:
    """2^(byte - BIAS) in fp32, exactly, by setting its bits."""
    return (byte.int() << FRACTION_BITS).view(torch.float32)
