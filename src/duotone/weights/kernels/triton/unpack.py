"""Nibbles to numbers inside a kernel: four bytes of a register at once on a GPU.

Codes of 4 bits come out times 16. A nibble in the upper half of its byte is that already, sign
included. So one shift and two masks unpack eight weights. The epilogue multiplies by 1/16, which is
exact. ASM is off in the interpreter, which knows no assembly.
"""

# ruff: noqa: D103  (kernels' helpers say what they do in a comment)
from __future__ import annotations

import os

import triton
import triton.language as tl

ASM = os.environ.get("TRITON_INTERPRET") != "1"


@triton.jit
def times_16(packed, ASM: tl.constexpr):
    # uint8 -> (low, high) nibbles, each as int8 times 16
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            shl.b32 $0, $2, 4;
            and.b32 $0, $0, 0xF0F0F0F0;
            and.b32 $1, $2, 0xF0F0F0F0;
            """,
            "=&r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low = (packed << 4).to(tl.int8, bitcast=True)
        high = (packed & 0xF0).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def as_bfloat16(packed, ASM: tl.constexpr):
    # uint8 -> (low, high) nibbles as bfloat16 (fp32 in the interpreter).
    # 0x4300 | u is 128 + u, u = code + 8; less 136.
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, a, b, c, d, bias;
            xor.b32 t, $4, 0x88888888;
            mov.b32 bias, 0x43084308;
            prmt.b32 a, t, 0, 0x4140;
            prmt.b32 b, t, 0, 0x4342;
            shr.b32 c, a, 4;
            shr.b32 d, b, 4;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 $0, a, bias;
            sub.bf16x2 $1, b, bias;
            sub.bf16x2 $2, c, bias;
            sub.bf16x2 $3, d, bias;
            }
            """,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.int32)
        low = (((wide & 15) ^ 8) - 8).to(tl.float32)
        high = (((wide >> 4) ^ 8) - 8).to(tl.float32)
    return low, high


@triton.jit
def dot4(weights, x, sums, ASM: tl.constexpr):
    # int32 words of four int8 each: sums + their products
    if ASM:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, x, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for byte in tl.static_range(4):
            left = (weights << (24 - 8 * byte)) >> 24
            right = (x << (24 - 8 * byte)) >> 24
            sums += left * right
    return sums


@triton.jit
def even_and_odd_bytes(first, second, ASM: tl.constexpr):
    # two words, bytes 0..7 -> words of bytes 0, 2, 4, 6 and 1, 3, 5, 7
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, $3, 0x6420;
            prmt.b32 $1, $2, $3, 0x7531;
            """,
            "=&r,=r,r,r",
            [first, second],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        even = (first & 0xFF) | ((first >> 8) & 0xFF00)
        even |= ((second & 0xFF) << 16) | ((second << 8) & -0x1000000)
        odd = ((first >> 8) & 0xFF) | ((first >> 16) & 0xFF00)
        odd |= ((second << 8) & 0xFF0000) | (second & -0x1000000)
    return even, odd
