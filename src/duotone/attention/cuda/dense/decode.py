"""Decode attention on 16-bit and fp8 segments: the sinks, windows and text beside packed ones.

The plain-torch reference is `attention.reference.attend` on the same segment. K and V are read as
they are (fp8 ones are exact in fp16); q and the softmax's weights keep two digits of the 16-bit
type, sums are fp32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from duotone.attention.cuda.shared.geometry import Geometry, cuts, multiprocessors, shared_bytes
from duotone.attention.cuda.shared.work import MAX_GROUP, QUERY_TYPES, Call, Task, Work
from duotone.cache.dense_dtype import FP8, ROWS
from duotone.cache.segments import DenseSegment

SOURCE = "dense/decode.cu"
# Warps per block and blocks per SM; smaller blocks where there are many.
WARPS, PER_SM = 4, 3
MANY_WARPS, MANY_PER_SM = 2, 6
# What parts of a head cost there beside `cut`'s times, in us: a launch that merges, since this one,
# the last of most calls, cannot.
MANY_SPLITS_US = 8.0
KV_TYPES = {torch.float16: 0, torch.bfloat16: 1, FP8: 2}
ALIGNMENT_BYTES = 16
# Records that a warp has room for, by bytes of an element and whether head_dim is above 128, where
# sums take the registers of all blocks but one, and few devices have the shared memory.
STAGES = {(2, False): 2, (2, True): 2, (1, False): 3, (1, True): 2}


class Arguments(Call):
    """`Arguments` of dense/decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value")),
        *((name, ctypes.c_longlong) for name in (
            "key_batch", "key_head", "value_batch", "value_head",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class DenseFormat:
    """Some tokens in shared memory: rows of K, then of V, an odd number of 16 bytes each.

    itemsize: bytes of an element. tokens: of a record, a multiple of 16. stages: records that a
    warp has room for; all but one of them are under way.
    """

    head_dim: int
    itemsize: int = 2
    tokens: int = 16
    stages: int = 2

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> DenseFormat:
        """Format by which the kernel reads such K and V."""
        stages = STAGES[dtype.itemsize, head_dim > 128]
        return cls(head_dim, dtype.itemsize, stages=stages)

    @property
    def channels(self) -> int:
        """head_dim."""
        return self.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of one stage of a warp's ring."""
        return 2 * self.tokens * 16 * (self.head_dim * self.itemsize // 16 | 1)


def dense_reason(query: Tensor, segment: DenseSegment) -> str | None:
    """Why the kernel cannot read a segment, or None."""
    key, value = segment.key, segment.value
    if query.dtype not in QUERY_TYPES:
        return f"query must be one of {list(QUERY_TYPES)}; got {query.dtype}"
    if segment.mask is not None:
        return "the CUDA kernels take no mask"
    channels, dtypes = (key.shape[3], value.shape[3]), (key.dtype, value.dtype)
    group, shared = query.shape[1] // key.shape[1], shared_bytes(query.device)
    if reason := shape_reason(channels, dtypes, group, shared):
        return reason
    head_dim, form = channels[0], DenseFormat.of(channels[0], key.dtype)
    apart = (x for x in (key, value) if x.stride(3) != 1 or x.stride(2) != head_dim)
    if next(apart, None) is not None:
        return "tokens of dense K and V must be adjacent"
    places = (x.data_ptr() for x in (key, value))
    strides = (form.itemsize * s for x in (key, value) for s in x.stride()[:2])
    if any(n % ALIGNMENT_BYTES for n in (*places, *strides)):
        return f"dense K and V must be aligned to {ALIGNMENT_BYTES} bytes"
    return None


def shape_reason(
    channels: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], group: int, shared: int
) -> str | None:
    """Why the kernel reads no K and V of such head dimensions and types, or None.

    group: q heads per kv head. shared: bytes of shared memory that a block may have.
    """
    if ROWS in dtypes:
        return "8-bit windows have a scale per token and head, which no CUDA kernel reads"
    if dtypes[0] not in KV_TYPES or dtypes[1] != dtypes[0]:
        return f"dense K and V must be of one 16-bit type or e4m3; got {dtypes[0]} and {dtypes[1]}"
    head_dim = channels[0]
    if channels[1] != head_dim or head_dim % 16 or head_dim > 256 or group > MAX_GROUP:
        return (
            "no CUDA kernel for head_dim "
            f"{head_dim} and {channels[1]} with {group} q heads per kv head"
        )
    form = DenseFormat.of(head_dim, dtypes[0])
    block_bytes = WARPS * form.stages * form.nbytes
    if block_bytes > shared:
        return f"head_dim {head_dim} needs {block_bytes} bytes of shared memory per block"
    return None


@cache
def geometry(form: DenseFormat, heads: int, records: int, sms: int) -> Geometry:
    """How a launch is cut. heads: batch * kv_heads."""
    many = heads > PER_SM * sms
    warps, per_sm = (MANY_WARPS, MANY_PER_SM) if many else (WARPS, PER_SM)
    per_sm = per_sm if form.head_dim <= 128 else 1
    options = cuts(form, warps * per_sm, heads, records, sms, per_sm=(per_sm,))
    splits_us = MANY_SPLITS_US if many else 0.0
    return min(options, key=lambda at: options[at] + (at.splits > 1) * splits_us)


def dense_task(query: Tensor, segment: DenseSegment) -> Task:
    """The launch over one segment. query: [batch, q_heads, 1, head_dim], contiguous."""
    key, value = segment.key, segment.value
    form = DenseFormat.of(key.shape[3], key.dtype)
    size = form.itemsize
    records = -(-key.shape[2] // form.tokens)
    work = Work(query, form, key.shape[1], records, segment.lengths)
    at = geometry(form, work.heads, records, multiprocessors(query.device))

    def arguments(**call: Any) -> Arguments:
        return Arguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_batch=size * key.stride(0),
            key_head=size * key.stride(1),
            value_batch=size * value.stride(0),
            value_head=size * value.stride(1),
            **call,
        )

    return Task(SOURCE, work, at, macros_of(form, key.dtype), arguments)


def macros_of(form: DenseFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of dense/decode.cu in addition to those of all kernels. dtype: of K and V."""
    return {"KV": KV_TYPES[dtype], "KEYS": form.tokens}
