"""Activation functions inside kernels."""

# ruff: noqa: D103
from __future__ import annotations

import triton
import triton.language as tl

from duotone.weights.kernels.triton.unpack import ASM

_APPROXIMATE = tl.constexpr(ASM)


@triton.jit
def sigmoid(x):
    # two approximations of 2^-22 and no care for subnormal numbers: half the instructions of exp
    # and a division. 0fBFB8AA3B is -log2(e).
    if _APPROXIMATE:
        y = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }
            """,
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def activated(x, KIND: tl.constexpr):
    # fp32 -> fp32
    if KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "quick_gelu":
        x = x * sigmoid(1.702 * x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x
