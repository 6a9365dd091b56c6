"""The weighted average of the codes of several layers (XQuant sec. 3.3.3).

    X_Q = round(sum_l gamma_l * codes_l)        gamma_l >= 0, sum_l gamma_l = 1

Rounded to nearest. The paper prints no rounding for the sum, but its Table 5 splits the range of
gamma_0 for pairs of 2 bits at 1/6, 1/4, 1/2, 3/4 and 5/6: where gamma_0 * delta, the codes
differing by delta = 1, 2 or 3, passes a half. Inside each of the six intervals rounding to nearest
gives one and the same result, and outside [1/6, 5/6] one layer's codes. On the borders, which the
table leaves out, ties go up as everywhere here; at gamma_0 = 1/2 that is the table's "Ceiling".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

# Weights such as 1/6 are not exact: what misses a tie by less is one. Codes are below 256, so sums
# in float32 are off by less than this, and no order of the layers changes the result.
TIE = 2.0**-14


def average_codes(
    codes: Sequence[UInt8[Tensor, "*b n"]], weights: Sequence[float]
) -> UInt8[Tensor, "*b n"]:
    """Average the codes of several layers, unpacked, with `weights` that sum to 1."""
    total = torch.zeros_like(codes[0], dtype=torch.float32)
    for layer, weight in zip(codes, weights, strict=True):
        total.add_(layer, alpha=weight)
    return total.add_(0.5 + TIE).floor_().to(torch.uint8)
