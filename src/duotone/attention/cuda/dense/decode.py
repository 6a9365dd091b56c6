"""Decode attention on 16-bit segments: the sinks, windows and text beside packed ones.

The plain-torch reference is `attention.reference.attend` on the same segment. K and V are read as
they are; q and the softmax's weights keep two digits of the 16-bit type, sums are fp32.
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
from duotone.cache.segments import DenseSegment

SOURCE = "dense/decode.cu"
# Warps per block and blocks per SM; smaller blocks where there are many.
WARPS, PER_SM = 4, 3
MANY_WARPS, MANY_PER_SM = 2, 6
# What parts of a head cost there beside `cut`'s times, in us: a launch that merges, since this one,
# the last of most calls, cannot.
MANY_SPLITS_US = 8.0
KV_TYPES = {torch.float16: 0, torch.bfloat16: 1}
ITEM_BYTES, ALIGNMENT_BYTES = 2, 16


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

    tokens: of a record, a multiple of 16. stages: records that a warp has room for; all but one of
    them are in flight.
    """

    head_dim: int
    tokens: int = 16
    stages: int = 2

    @property
    def channels(self) -> int:
        """head_dim."""
        return self.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of one stage of a warp's ring."""
        return 2 * self.tokens * 16 * (self.head_dim * ITEM_BYTES // 16 | 1)


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
    head_dim = channels[0]
    apart = (x for x in (key, value) if x.stride(3) != 1 or x.stride(2) != head_dim)
    if next(apart, None) is not None:
        return "tokens of dense K and V must be adjacent"
    places = (x.data_ptr() for x in (key, value))
    strides = (ITEM_BYTES * s for x in (key, value) for s in x.stride()[:2])
    if any(n % ALIGNMENT_BYTES for n in (*places, *strides)):
        return f"dense K and V must be aligned to {ALIGNMENT_BYTES} bytes"
    return None


def shape_reason(
    channels: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], group: int, shared: int
) -> str | None:
    """Why the kernel reads no K and V of such head dimensions and types, or None.

    group: q heads per kv head. shared: bytes of shared memory that a block may have.
    """
    if dtypes[0] not in KV_TYPES or dtypes[1] != dtypes[0]:
        return f"dense K and V must be of one 16-bit type; got {dtypes[0]} and {dtypes[1]}"
    head_dim = channels[0]
    if channels[1] != head_dim or head_dim % 16 or head_dim > 256 or group > MAX_GROUP:
        return (
            "no CUDA kernel for head_dim "
            f"{head_dim} and {channels[1]} with {group} q heads per kv head"
        )
    form = DenseFormat(head_dim)
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
    form = DenseFormat(key.shape[3])
    records = -(-key.shape[2] // form.tokens)
    work = Work(query, form, key.shape[1], records, segment.lengths)
    at = geometry(form, work.heads, records, multiprocessors(query.device))

    def arguments(**call: Any) -> Arguments:
        return Arguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_batch=ITEM_BYTES * key.stride(0),
            key_head=ITEM_BYTES * key.stride(1),
            value_batch=ITEM_BYTES * value.stride(0),
            value_head=ITEM_BYTES * value.stride(1),
            **call,
        )

    return Task(SOURCE, work, at, macros_of(form, key.dtype), arguments)


def macros_of(form: DenseFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of dense/decode.cu in addition to those of all kernels. dtype: of K and V."""
    return {"KV": KV_TYPES[dtype], "KEYS": form.tokens}
