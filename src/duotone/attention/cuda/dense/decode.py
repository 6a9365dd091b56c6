"""Decode attention on 16-bit segments: the sinks, windows and text next to packed ones.

The plain-torch reference is `attention.reference.attend` on the same segment. K and V are read as
they are; q and the softmax's weights keep two digits of the 16-bit type, sums are fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from duotone.attention.cuda.shared.geometry import Geometry, cuts, multiprocessors
from duotone.attention.cuda.shared.work import Call, Fields, Task, Work
from duotone.cache.segments import DenseSegment

SOURCE = "dense/decode.cu"
# Warps per block and blocks per SM; smaller blocks where there are many.
WARPS, PER_SM = 4, 3
MANY_WARPS, MANY_PER_SM = 2, 6
# What parts of a head cost there in addition to `cut`'s times, in us: a launch that merges, since
# this one, the last of most calls, cannot.
MANY_SPLITS_US = 8.0
KV_TYPES = {torch.float16: 0, torch.bfloat16: 1}
ITEM_BYTES = 2


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


@cache
def geometry(form: DenseFormat, heads: int, records: int, sms: int) -> Geometry:
    """Cut a launch. heads: batch * kv_heads."""
    many = heads > PER_SM * sms
    warps, per_sm = (MANY_WARPS, MANY_PER_SM) if many else (WARPS, PER_SM)
    per_sm = per_sm if form.head_dim <= 128 else 1
    options = cuts(form, warps * per_sm, heads, records, sms, per_sm=(per_sm,))
    splits_us = MANY_SPLITS_US if many else 0.0
    return min(options, key=lambda at: options[at] + (at.splits > 1) * splits_us)


def dense_task(
    query: Tensor, segment: DenseSegment, tau: tuple[float, float] | None = None
) -> Task:
    """The launch over one segment. query: [batch, q_heads, 1, head_dim], contiguous.

    tau: for other segments only.
    """
    key = segment.key
    form = DenseFormat(key.shape[3])
    records = _records(key.shape[2])
    work = Work(query, form, key.shape[1], records, segment.lengths)
    at = geometry(form, work.heads, records, multiprocessors(query.device))

    def arguments(**call: Any) -> Arguments:
        return Arguments(**(call | moves(segment)))

    return Task(SOURCE, work, at, macros_of(form, key.dtype), arguments)


def moves(segment: DenseSegment) -> Fields:
    """Arguments that follow the tensors of a segment."""
    key, value = segment.key.stride(), segment.value.stride()
    return {
        "tokens": segment.lengths.data_ptr(),
        "key": segment.key.data_ptr(),
        "value": segment.value.data_ptr(),
        "key_batch": ITEM_BYTES * key[0],
        "key_head": ITEM_BYTES * key[1],
        "value_batch": ITEM_BYTES * value[0],
        "value_head": ITEM_BYTES * value[1],
    }


def _records(tokens: int) -> int:
    """Records of a head, at most."""
    return -(-tokens // DenseFormat.tokens)


def sizes(segment: DenseSegment) -> Hashable:
    """Gather what a launch depends on, except `moves`."""
    key, value = segment.key, segment.value
    batch, heads, tokens, head_dim = key.shape
    return batch, heads, head_dim, value.shape[3], key.dtype, value.dtype, _records(tokens)


def macros_of(form: DenseFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of dense/decode.cu in addition to those of all kernels. dtype: of K and V."""
    return {"KV": KV_TYPES[dtype], "KEYS": form.tokens}
