"""Tokens of the dense store in 8-bit floats: half the bytes of 16-bit windows.

e4m3 without a scale: a number is rounded to 4 significant bits, at worst by 1 in 16 of itself or,
below 2^-6, by 2^-10, and cut off at 448. What windows lose by it: docs/table.md, rows of windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.quant import CacheSpec

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def dense_dtype(spec: CacheSpec, dtype: torch.dtype) -> torch.dtype:
    """What a cache keeps dense tokens in. dtype: the model's."""
    return dtype if spec.dense_dtype == "model" else getattr(torch, spec.dense_dtype)


def kept_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, rounded to nearest; 8-bit floats are cut off at their largest number."""
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 and x.dtype != FP8 else x.to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as integers, which torch can gather and scatter; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
