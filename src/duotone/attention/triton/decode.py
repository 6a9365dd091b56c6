"""Decode attention in Triton: the portable kernel path (any GPU, TRITON_INTERPRET=1 on a CPU).

Each segment is one launch over (sequence and kv head) x (splits of its tokens) that writes partial
outputs into one workspace; a last launch merges the partials of all splits of all segments. Before
it, small launches fold q into the blocks of K and turn class numbers of V into channel orders. With
calibration, launches over the visual segments come first and write partial score ranges, which the
attention kernel reduces itself. Nothing synchronizes with the host and grids depend on shapes only,
so the whole call can be captured in a CUDA graph. Lengths are read on the device.

Where it trades: canonical bytes, no layout of its own. Unpacking costs about the same per element
at 1, 2 and 4 bits, so few bits save memory and less time than their bytes would allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.attention.rotated import Wants, segment_query
from duotone.attention.triton.family import first_refusal
from duotone.attention.triton.kernels import merge_kernel, segment_kernel
from duotone.attention.triton.operands import (
    arithmetic,
    codes_of,
    head_dim_of,
    head_rows,
    kind_of,
    loop_tiles,
    operand,
)
from duotone.attention.triton.prepare import class_order_kernel, fold_kernel
from duotone.attention.triton.range import score_range_kernel
from duotone.cache.packed import PackedTensor
from duotone.cache.segments import Segment
from duotone.quant.rotation import out_of_basis
from duotone.tools.devices import facts

# A shorter split would spend more on its partial output than on its keys.
MIN_SPLIT_TOKENS = 128
# What an SM holds of the one-warp kernels: they use all registers that a thread may have.
PROGRAMS_PER_SM = 8
# The interpreter runs programs one after the other: enough to exercise splits, not more.
CPU_PROGRAMS = 8


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
    Errors: ValueError with the reason of the family.
    """
    if reason := first_refusal(query, kv):
        raise ValueError(f"{reason}. Use impl='reference'.")
    query = query.contiguous()
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        launches = [SegmentLaunch(query, segment, sm_scale) for segment in kv if segment.tokens]
        return attend_launches(query, launches, head_dim_of(kv[0].value), tau)


def attend_launches(
    query: Tensor,
    launches: Sequence[SegmentLaunch],
    value_dim: int,
    tau: tuple[float, float] | None,
) -> Tensor:
    """Run the launches of all segments and merge their partial outputs.

    launches: a `SegmentLaunch` per segment, or what does as one. Returns [batch, q_heads, 1,
    value_dim] in the dtype of `query`.
    """
    batch, q_heads = query.shape[:2]
    all_splits = sum(launch.splits for launch in launches)
    partial = query.new_empty(batch, q_heads, all_splits, value_dim, dtype=torch.float32)
    lse = query.new_empty(batch, q_heads, all_splits, dtype=torch.float32)
    result = query.new_empty(batch, q_heads, 1, value_dim)
    for launch in launches:
        launch.prepare()
    ranges = None if tau is None else _score_ranges(query, launches)
    first = 0
    for launch in launches:
        launch.attend(partial, lse, first, ranges, tau)
        launch.turn_back(partial[:, :, first : first + launch.splits])
        first += launch.splits
    pad = triton.next_power_of_2(value_dim)
    merge_kernel[(batch * q_heads,)](
        partial, lse, result, all_splits, V_D=value_dim, V_PAD=pad, BS=16, num_warps=4
    )
    return result


def _score_ranges(query: Tensor, launches: list[SegmentLaunch]) -> Tensor | None:
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


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROGRAMS
    return PROGRAMS_PER_SM * facts(device).multiprocessors


class SegmentLaunch:
    """One segment's kernel arguments; all of them known without reading the device."""

    def __init__(self, query: Tensor, segment: Segment, sm_scale: float) -> None:
        self.visual, self.key, self.value = segment.visual, segment.key, segment.value
        kv_heads = codes_of(segment.key).shape[1]
        rows = query.shape[0] * kv_heads
        self.splits = split_count(rows, segment.tokens, query.device)
        self.grid = (rows, self.splits)
        self.shared: dict[str, Any] = {
            "p_q": segment_query(query, Wants.of(segment)),
            "p_lengths": segment.lengths.contiguous(),
            "p_mask": None if segment.mask is None else segment.mask.contiguous(),
            "sm_scale": float(sm_scale),
            "kv_heads": kv_heads,
            "mask_width": 0 if segment.mask is None else segment.mask.shape[2],
            "splits": self.splits,
            "HAS_MASK": segment.mask is not None,
            **head_rows(query.shape[1] // kv_heads),
            **arithmetic(query, segment),
            **operand("k", segment.key),
        }
        self.shared["K_TILES"] = loop_tiles(segment.key, self.shared["BN"])
        self.only_value = operand("v", segment.value)

    def prepare(self) -> None:
        """Launch what the kernels over tokens need: K's folded q, V's channel orders."""
        folded = self._fold() if kind_of(self.key) == "block" else (None, None)
        self.shared |= dict(zip(("p_k_fold", "p_k_affine"), folded, strict=True))
        self.only_value["p_v_order"] = channel_order(self.value)

    def _fold(self) -> tuple[Tensor, Tensor]:
        """(operands [rows, q heads of a kv head, slots * bytes], (factor, offset) of each row)."""
        at, query = self.shared, self.shared["p_q"]
        rows = self.grid[0] * at["k_blocks"]
        columns = 8 // at["K_BITS"] * at["K_PAD"]
        dtype = torch.float16 if at["DT"] == tl.float16 else torch.float32
        fold = query.new_empty(rows, at["G"], columns, dtype=dtype)
        affine = query.new_empty(rows, at["G"], 2, dtype=torch.float32)
        fold_kernel[(rows,)](
            query,
            at["p_k_scale"],
            at["p_k_zero"],
            at["p_k_signs"],
            at["p_k_modes"],
            self.key.classes,
            at["p_k_offsets"],
            fold,
            affine,
            at["k_blocks"],
            at["kv_heads"],
            **{name: at[name] for name in ("G", "UNIT", "DT")},
            **{n: at[f"K_{n}"] for n in ("D", "BITS", "CLASSES", "COLUMNS", "GROUP", "PAD")},
            GP=triton.next_power_of_2(at["G"]),
            D_PAD=triton.next_power_of_2(at["K_D"]),
            OFFSETS=at["K_D"] if self.key.classes is not None else at["K_COLUMNS"],
            num_warps=1,
        )
        return fold, affine

    def turn_back(self, partial: Tensor) -> None:
        """Bring this segment's partial outputs out of the basis of its values, in place."""
        if isinstance(self.value, PackedTensor) and self.value.spec.transform is not None:
            partial.copy_(out_of_basis(partial, self.value.spec.transform))

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
            **self.only_value,
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


def channel_order(x: PackedTensor | Tensor) -> Tensor | None:
    """`PackedTensor.channel_order` as bytes, [batch, kv_heads, blocks, channels], by a kernel."""
    if not isinstance(x, PackedTensor) or x.classes is None:
        return None
    order = x.classes.new_empty(*x.classes.shape[:3], x.head_dim)
    class_order_kernel[(order[..., 0].numel(),)](
        x.classes, order, D=x.head_dim, D_PAD=triton.next_power_of_2(x.head_dim), num_warps=1
    )
    return order
