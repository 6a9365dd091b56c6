"""Tokens after the packed ones of a paged stream: 16-bit rows in pages of the same pool."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.groups.format import GroupFormat
from duotone.attention.cuda.shared.work import Call
from duotone.attention.refused import RefusedError

# TAIL of groups/tail.cuh.
ROW_TYPES = {torch.float16: 1, torch.bfloat16: 2}


class Arguments(Call):
    """`Arguments` of groups/separate.cuh, where streams have tails."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tail_pages", "tail_tokens")),
        ("query_stride", ctypes.c_longlong),
    )


@dataclass(frozen=True)
class Tail:
    """Where each sequence's tokens after its packed ones are.

    pages: int32, contiguous, numbers in the pool of the packed tokens. Of each head a page holds
    rows of K, then as many of V; token t of a sequence is in row t % (rows of its pages). tokens:
    int64. dtype: of K and V.
    """

    pages: Int[Tensor, "batch pages_per_tail"]
    tokens: Int[Tensor, " batch"]
    dtype: torch.dtype

    def arguments(self, query_stride: int, **call: Any) -> Arguments:
        """The structure of a launch. query_stride: numbers from a sequence to the next one."""
        where = {"tail_pages": self.pages.data_ptr(), "tail_tokens": self.tokens.data_ptr()}
        return Arguments(query_stride=query_stride, **where, **call)

    @property
    def macros(self) -> dict[str, int]:
        """Macros of groups/tail.cuh."""
        return {"TAIL": ROW_TYPES[self.dtype], "TAIL_PAGES": self.pages.shape[1]}


def check(form: GroupFormat, dtype: torch.dtype) -> None:
    """Raise `RefusedError` for pages and rows that no kernel reads or writes."""
    if dtype not in ROW_TYPES:
        raise RefusedError(f"tails are rows of {list(ROW_TYPES)}; got {dtype}")
    if form.is_apart or form.key.along_k or form.value.along_k:
        raise RefusedError(
            "tails follow pages with all codes, whose scales run along what is not summed over; "
            f"got {form.key} and {form.value}"
        )
    row_bytes = form.head_dim * dtype.itemsize
    if form.channels != form.head_dim or form.own_nbytes % (2 * row_bytes):
        raise RefusedError(f"pages must hold whole rows of K and V; got head_dim {form.head_dim}")
