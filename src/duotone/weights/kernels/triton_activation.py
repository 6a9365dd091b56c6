"""Activation functions inside kernels."""

# ruff: noqa: D103
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, KIND: tl.constexpr):
    # fp32 -> fp32
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x
