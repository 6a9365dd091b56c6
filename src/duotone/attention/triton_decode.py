"""Decode attention in Triton: the portable kernel path (any GPU, TRITON_INTERPRET=1 on a CPU).

Each segment is one launch over (sequence and kv head) x (splits of its tokens) that writes partial
outputs into one workspace; a last launch merges the partials of all splits of all segments. With
calibration, launches over the visual segments come first and write partial score ranges, which the
attention kernel reduces itself. Nothing synchronizes with the host and grids depend on shapes only,
so the whole call can be captured in a CUDA graph. Lengths are read on the device.

Where it trades: canonical bytes, no layout of its own. Unpacking costs about the same per element
at 1, 2 and 4 bits, so few bits save memory and less time than their bytes would allow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.attention.triton_kernels import merge_kernel, score_range_kernel, segment_kernel
from duotone.cache.packed import PackedTensor
from duotone.cache.segments import PackedSegment, Segment

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
# tl.dot wants 16 by 16 at least: the q heads of one kv head, and the bytes of one row of codes.
MIN_ROWS = 16
MIN_COLUMNS = 16
# A shorter split would spend more on its partial output than on its keys.
MIN_SPLIT_TOKENS = 128
# What an SM holds of the one-warp kernels: they use all registers that a thread may have.
PROGRAMS_PER_SM = 8
# The interpreter runs programs one after the other: enough to exercise splits, not more.
CPU_PROGRAMS = 8


def unsupported(query: Tensor, kv: Sequence[Segment]) -> str | None:
    """Why Triton cannot run this call, or None.

    query: [batch, q_heads, 1, head_dim]. kv: the segments that it attends to.
    """
    if not query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA device or TRITON_INTERPRET=1; the query is on {query.device}"
    if query.dtype not in QUERY_DTYPES:
        return f"query must be one of {QUERY_DTYPES}; got {query.dtype}"
    if query.dim() != 4 or query.shape[2] != 1:
        return f"query must be [batch, q_heads, 1, head_dim]; got {tuple(query.shape)}"
    reasons = (_tensor_reason(t, query) for s in kv for t in (s.key, s.value))
    reason = next((r for r in reasons if r), None)
    if reason is None and len({_head_dim(s.value) for s in kv}) > 1:
        return f"all segments must share one value_dim; got {[_head_dim(s.value) for s in kv]}"
    return reason


def _tensor_reason(x: PackedTensor | Tensor, query: Tensor) -> str | None:
    if _head_dim(x) > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}; got {_head_dim(x)}"
    if isinstance(x, PackedTensor):
        if x.spec.mapping != "asymmetric":
            return f"packed tensors must have mapping='asymmetric'; got {x.spec.mapping!r}"
        if x.spec.classes:
            return "packed tensors must have one width; got classes of channels"
        ok = all(t.is_contiguous() for t in (x.codes, x.scale, x.zero_point))
        return None if ok else "codes, scale and zero_point must be contiguous"
    if x.dtype not in QUERY_DTYPES:
        return f"dense K and V must be one of {QUERY_DTYPES}; got {x.dtype}"
    rows = (x.stride(0), x.stride(1), x.stride(2))
    ok = x.stride(3) == 1 and x.stride(2) == x.shape[3] and not any(r % x.shape[3] for r in rows)
    return None if ok or not x.numel() else f"tokens of dense K and V must be adjacent; got {rows}"


def decode_attention_triton(
    query: Tensor,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
) -> Tensor:
    """softmax(q K^T * sm_scale) V of one query per sequence: `reference.attend`, by Triton kernels.

    query: [batch, q_heads, 1, head_dim]. kv: segments of the same batch and kv_heads.
    tau: calibrates the scores of visual segments (CalibQuant eq. 7), or None.
    Returns [batch, q_heads, 1, value_dim] in the dtype of `query`; 0 where no key is visible.
    Products run in fp16 on exact codes (fp32 for fp32 queries), sums in fp32; dense segments in
    tf32 (fp32 for fp32 queries).
    Errors: ValueError with the reason from `unsupported`.
    """
    reason = unsupported(query, kv)
    if reason is not None:
        raise ValueError(f"{reason}. Use impl='reference'.")
    query = query.contiguous()
    batch, q_heads = query.shape[:2]
    launches = [_Launch(query, segment, sm_scale) for segment in kv if segment.tokens]
    all_splits = sum(launch.splits for launch in launches)
    value_dim = _head_dim(kv[0].value)
    partial = query.new_empty(batch, q_heads, all_splits, value_dim, dtype=torch.float32)
    lse = query.new_empty(batch, q_heads, all_splits, dtype=torch.float32)
    result = query.new_empty(batch, q_heads, 1, value_dim)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        ranges = None if tau is None else _score_ranges(query, launches)
        first = 0
        for launch in launches:
            launch.attend(partial, lse, first, ranges, tau)
            first += launch.splits
        pad = triton.next_power_of_2(value_dim)
        merge_kernel[(batch * q_heads,)](
            partial, lse, result, all_splits, V_D=value_dim, V_PAD=pad, BS=16, num_warps=4
        )
    return result


def _score_ranges(query: Tensor, launches: list[_Launch]) -> Tensor | None:
    """Partial (minimum, maximum) of the visual scores, [batch, q_heads, splits, 2]."""
    visual = [launch for launch in launches if launch.visual]
    if not visual:
        return None
    splits = sum(launch.splits for launch in visual)
    ranges = query.new_empty(*query.shape[:2], splits, 2, dtype=torch.float32)
    first = 0
    for launch in visual:
        launch.score_range(ranges, first)
        first += launch.splits
    return ranges


def tile_config(
    bits: int, head_dim: int, *, block: int | None = None, groups: bool = False, exact: bool = False
) -> dict[str, int]:
    """Tokens per tile, warps and pipeline stages; measured on an H200 (benchmarks/kernel_check.py).

    bits: the wider of K and V, 16 if dense. head_dim: the larger of K's and V's.
    block: the shortest group along tokens, if any: a longer tile would stay empty behind it.
    groups: some tensor has groups along channels, whose values are built in registers.
    exact: products in fp32, which run outside the matrix units.
    """
    # One warp needs no barriers, as long as its accumulators fit its registers.
    tokens, warps, stages = 64, 1 if head_dim <= 128 else 2, 3
    if exact or bits == 16:
        tokens, warps, stages = 32, 4, 2
    elif groups:
        tokens, warps, stages = 32, warps if bits <= 2 else 4, 2
    elif bits == 8:
        tokens, warps, stages = 32, 2, 2
    if block is not None:
        tokens = min(tokens, max(16, triton.next_power_of_2(block)))
    return {"BN": tokens, "num_warps": warps, "num_stages": stages}


def split_count(rows: int, tokens: int, device: torch.device) -> int:
    """Splits of a segment's tokens: the fewest that nearly fill whole waves of programs.

    rows: batch * kv_heads. tokens: width of the token axis (lengths stay on the device).
    """
    slots = _programs(device)
    most = min(-(-2 * slots // max(1, rows)), -(-tokens // MIN_SPLIT_TOKENS))
    filled = {
        n: rows * n / slots / max(1, -(-rows * n // slots)) for n in range(1, max(1, most) + 1)
    }
    return next(n for n, share in filled.items() if share >= 0.9 * max(filled.values()))


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


class _Launch:
    """One segment's kernel arguments; all of them known without reading the device."""

    def __init__(self, query: Tensor, segment: Segment, sm_scale: float) -> None:
        self.visual = segment.visual
        kv_heads = _codes(segment.key).shape[1]
        rows = query.shape[0] * kv_heads
        self.splits = split_count(rows, segment.tokens, query.device)
        self.grid = (rows, self.splits)
        self.shared = {
            "p_q": query,
            "p_lengths": segment.lengths.contiguous(),
            "p_mask": None if segment.mask is None else segment.mask.contiguous(),
            "sm_scale": float(sm_scale),
            "kv_heads": kv_heads,
            "mask_width": 0 if segment.mask is None else segment.mask.shape[2],
            "splits": self.splits,
            "HAS_MASK": segment.mask is not None,
            **_head_rows(query.shape[1] // kv_heads),
            **_arithmetic(query, segment),
            **_operand("k", segment.key),
        }
        self.value = _operand("v", segment.value)

    def score_range(self, ranges: Tensor, first_split: int) -> None:
        """Write this segment's partial ranges into ranges [batch, q_heads, splits, 2]."""
        score_range_kernel[self.grid](
            **self.shared, p_ranges=ranges, first_split=first_split, all_splits=ranges.shape[2]
        )

    def attend(
        self,
        partial: Tensor,
        lse: Tensor,
        first_split: int,
        ranges: Tensor | None,
        tau: tuple[float, float] | None,
    ) -> None:
        """Write partial outputs [batch, q_heads, splits, value_dim] and their lse (log2)."""
        calibrate = ranges is not None and self.visual
        segment_kernel[self.grid](
            **self.shared,
            **self.value,
            p_ranges=ranges if calibrate else None,
            p_out=partial,
            p_lse=lse,
            tau1=float(tau[0]) if calibrate else 0.0,
            tau2=float(tau[1]) if calibrate else 0.0,
            first_split=first_split,
            all_splits=lse.shape[2],
            range_splits=ranges.shape[2] if calibrate else 0,
            CALIBRATE=calibrate,
        )


def _head_rows(group: int) -> dict[str, int]:
    return {"G": group, "HP": max(MIN_ROWS, triton.next_power_of_2(group))}


def _arithmetic(query: Tensor, segment: Segment) -> dict[str, Any]:
    """Types of the products, and the tile that suits them."""
    tensors = (segment.key, segment.value)
    packed = isinstance(segment, PackedSegment)
    types = [query.dtype] if packed else [query.dtype, *(t.dtype for t in tensors)]
    exact = torch.float32 in types
    half = packed and not exact
    specs = [t.spec for t in tensors] if packed else []
    blocks = [s.group for s in specs if s.along != "channels" and s.group is not None]
    tile = tile_config(
        bits=max((s.bits for s in specs), default=16),
        head_dim=max(_head_dim(t) for t in tensors),
        block=min(blocks, default=None),
        groups=any(_kind(t) == "group" for t in tensors),
        exact=exact,
    )
    return {
        "DT": tl.float16 if half else tl.float32,
        "UNIT": 2.0**24 if half else 1.0,
        "PRECISION": "ieee" if exact else "tf32",
        **tile,
    }


def _operand(name: str, x: PackedTensor | Tensor) -> dict[str, Any]:
    """Kernel arguments of K or V (name "k" or "v"): pointers, sizes in rows, constants."""
    width = _codes(x).shape[3]
    if isinstance(x, Tensor):
        pointers = {"": x, "_scale": None, "_zero": None, "_offsets": None}
        rows = (x.stride(0) // width, x.stride(1) // width)
        blocks, bits, columns, group = 0, 8, 1, 1
    else:
        offsets = None if x.per_token else x.blocks.offsets.contiguous()
        pointers = {"": x.codes, "_scale": x.scale, "_zero": x.zero_point, "_offsets": offsets}
        rows = (x.codes.shape[1] * x.tokens, x.tokens)
        blocks = 0 if x.per_token else x.scale.shape[2]
        bits, columns = x.spec.bits, x.scale.shape[3]
        group = min(x.spec.group or x.head_dim, x.head_dim)
    constants = {
        "KIND": _kind(x),
        "D": _head_dim(x),
        "BITS": bits,
        "COLUMNS": columns,
        "GROUP": group,
        "WIDTH": width,
        "PAD": max(MIN_COLUMNS, triton.next_power_of_2(width)),
    }
    return {
        **{f"p_{name}{part}": pointer for part, pointer in pointers.items()},
        f"{name}_batch_rows": rows[0],
        f"{name}_head_rows": rows[1],
        f"{name}_blocks": blocks,
        **{f"{name.upper()}_{constant}": value for constant, value in constants.items()},
    }


def _kind(x: PackedTensor | Tensor) -> str:
    """How the kernels name the way x is stored: see `triton_tiles`."""
    if isinstance(x, Tensor):
        return "dense"
    if not x.per_token:
        return "block"
    return "token" if x.scale.shape[3] == 1 else "group"


def _codes(x: PackedTensor | Tensor) -> Tensor:
    return x.codes if isinstance(x, PackedTensor) else x


def _head_dim(x: PackedTensor | Tensor) -> int:
    return x.head_dim if isinstance(x, PackedTensor) else x.shape[-1]
