"""AIFS's product: two contiguous slices of the rows, one scale each (MQuant 3.3).

Where visual tokens come first (`weights.equivalences.reorder`), no row has to look its scale up.
Integers and fp32 arithmetic of every row equal a product with a scale per row, bit by bit. The
difference is two launches with a tail each, instead of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.weights.modules.linear import linear_int
from duotone.weights.modules.packed_weight import PackedWeight


def linear_by_slices(
    x_q: Tensor,
    scales: Tensor,
    first: int,
    weight: PackedWeight,
    x0: Tensor | None = None,
    bias: Tensor | None = None,
    impl: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`linear_int` of rows whose scale is scales[1] (visual) up to row `first`, then scales[0].

    x_q: int8 [tokens, in]. scales: float32 [text, visual]. Both slices write into one result
    [tokens, out]. Errors: ValueError for another number of scales, a `first` beyond the rows, and
    all that `linear_int` refuses.
    """
    tokens = len(x_q)
    if tuple(scales.shape) != (2,) or not 0 <= first <= tokens:
        raise ValueError(
            f"slices need scales [text, visual] and a boundary within 0..{tokens}; got scales "
            f"{tuple(scales.shape)} and first={first}"
        )
    y = torch.empty(tokens, weight.shape[0], dtype=dtype, device=x_q.device)
    for rows, scale in ((slice(0, first), scales[1:]), (slice(first, tokens), scales[:1])):
        if rows.start < rows.stop:
            own = None if x0 is None else x0[rows]
            linear_int(x_q[rows], scale, weight, own, bias, impl, dtype, out=y[rows])
    return y
