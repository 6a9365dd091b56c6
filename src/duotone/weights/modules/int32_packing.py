"""4-bit codes in the int32 words of the compressed-tensors format (pack-quantized)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CODES_PER_WORD = 8


def pack_int32(codes: Tensor) -> Tensor:
    """int8 [out, in] in [-8, 7] -> int32 [out, ceil(in / 8)]: code + 8, the first in the low bits.

    Errors: ValueError for another dtype or codes out of range.
    """
    if codes.dtype != torch.int8 or (codes.numel() and (codes.min() < -8 or codes.max() > 7)):
        raise ValueError(f"4-bit codes are int8 in [-8, 7], got {codes.dtype}")
    shifted = codes.to(torch.int64) + 8
    # What is beyond the last column reads as code -8 + 8 = 0.
    shifted = F.pad(shifted, (0, -codes.shape[1] % CODES_PER_WORD))
    places = torch.arange(CODES_PER_WORD, device=codes.device) * 4
    words = (shifted.unflatten(1, (-1, CODES_PER_WORD)) << places).sum(-1)
    # The top nibble is the sign: bring [0, 2^32) to int32's range.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
