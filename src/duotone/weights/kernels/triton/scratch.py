"""int4 -> int8, or -> 16 bit, into memory that every layer uses again: W4 for many tokens."""

# ruff: noqa: D103
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.scratch import scratch
from duotone.weights.kernels.triton.unpack import ASM, times_16
from duotone.weights.modules.packed_weight import PackedWeight

_BYTES = 4096


@triton.jit
def unpack_kernel(packed, codes, count, BLOCK: tl.constexpr, ASM: tl.constexpr):
    o_byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, high = times_16(tl.load(packed + o_byte, mask=o_byte < count, other=0), ASM)
    both = tl.interleave(low, high)
    o_code = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(codes + o_code, both, mask=o_code < 2 * count)


@triton.jit
def dequantize_kernel(
    packed, scale, w0, weight, columns, groups, size, BLOCK: tl.constexpr, ASM: tl.constexpr
):
    # columns: bytes of a row; size: bytes of a group
    i_row = tl.program_id(0).to(tl.int64)
    o_byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_byte = o_byte < columns
    low, high = times_16(tl.load(packed + i_row * columns + o_byte, mask=m_byte, other=0), ASM)
    b_scale = tl.load(scale + i_row * groups + o_byte // size, mask=m_byte, other=0.0) * 0.0625
    low, high = low.to(tl.float32) * b_scale, high.to(tl.float32) * b_scale
    if w0 is not None:
        low = tl.where(o_byte == 0, tl.load(w0 + i_row).to(tl.float32), low)
    both = tl.interleave(low, high).to(weight.dtype.element_ty)
    o_code = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(weight + i_row * (2 * columns) + o_code, both, mask=o_code < 2 * columns)


def unpacked_times_16(weight: PackedWeight) -> Tensor:
    """The 4-bit codes times 16 as int8 [out, in], in shared memory: valid under `LAUNCHES`."""
    rows, columns = weight.shape
    codes = scratch(weight.codes.device, "unpacked weights", rows * columns, torch.int8)
    count = weight.codes.numel()
    unpack_kernel[(triton.cdiv(count, _BYTES),)](
        weight.codes, codes, count, BLOCK=_BYTES, ASM=ASM, num_warps=4
    )
    return codes.view(rows, columns)


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """A 4-bit weight as `dtype` (16 bit) [out, in], in shared memory: valid under `LAUNCHES`."""
    rows, columns = weight.shape
    made = scratch(weight.codes.device, "dequantized weights", rows * columns, torch.int16)
    made = made.view(dtype)
    packed = columns // 2
    size = packed if weight.group_size is None else weight.group_size // 2
    dequantize_kernel[(rows, triton.cdiv(packed, 2048))](
        weight.codes,
        weight.scale,
        weight.w0,
        made,
        packed,
        packed // size,
        size,
        BLOCK=2048,
        ASM=ASM,
        num_warps=4,
    )
    return made.view(rows, columns)
