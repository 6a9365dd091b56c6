"""Weighted average of the codes of several layers (XQuant sec. 3.3.3).

    X_Q = round(sum_l gamma_l * codes_l)        gamma_l >= 0, sum_l gamma_l = 1

The average is rounded to nearest. The paper prints no rounding for the sum. Its Table 5 splits the
range of gamma_0 for pairs of 2 bits at 1/6, 1/4, 1/2, 3/4 and 5/6. There gamma_0 * delta passes a
half, where the codes differ by delta = 1, 2 or 3. Inside each of the six intervals rounding to
nearest gives one result, and outside [1/6, 5/6] one layer's codes. The table leaves out the
borders; ties go up there, as everywhere here. At gamma_0 = 1/2 this is the table's "Ceiling".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

# Weights such as 1/6 are not exact: a sum that misses a tie by less counts as a tie. Codes are
# below 256, so float32 sums are off by less than this, and no order of layers changes the result.
TIE = 2.0**-14


def average_codes(
    codes: Sequence[UInt8[Tensor, "*b n"]], weights: Sequence[float]
) -> UInt8[Tensor, "*b n"]:
    """Average the codes of several layers, unpacked, with `weights` that sum to 1."""
    total = torch.zeros_like(codes[0], dtype=torch.float32)
    for layer, weight in zip(codes, weights, strict=True):
        total.add_(layer, alpha=weight)
    return total.add_(0.5 + TIE).floor_().to(torch.uint8)
