"""Input of decode kernels: the work, a task that does it, the structure of its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.attention.cuda.shared.geometry import Format, Geometry

MAX_GROUP = 16
QUERY_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Fields of `Call` by name.
Fields = dict[str, int | float | None]


def inverse_of(splits: int) -> int:
    """`splits_inverse` of `Call`: the upper word of its product with x is x // splits.

    Exact for x below 2^32 / splits, and not used for one split.
    """
    return -(-(1 << 32) // splits) & 0xFFFFFFFF


class Call(ctypes.Structure):
    """`Call` of call.cuh: arguments of every decode kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "tokens", "first_packed_tiles", "query", "packed_tiles",
        )),
        *((name, ctypes.c_int) for name in (
            "kv_heads", "blocks", "splits", "packed_tiles_per_head",
        )),
        ("splits_inverse", ctypes.c_uint),
        *((name, ctypes.c_void_p) for name in (
            "pages", "partial", "weights", "counters", "out", "lse",
        )),
        *((name, ctypes.c_longlong) for name in ("out_stride", "lse_stride")),
        *((name, ctypes.c_int) for name in (
            "pages_per_sequence", "first_part", "all_parts", "units",
        )),
        ("sm_scale", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Input tensors of a launch.

    query: [batch, q_heads, 1, head_dim], contiguous. records: of each kv head, at most. data:
    [batch, kv_heads, records, format.nbytes], None where the kernel finds tokens by itself. first:
    [batch, blocks], the first record of each block; None: one block, from record 0 on. tokens:
    [batch, blocks + 1] int64, offsets of the blocks; [batch], lengths, without `first`.
    pages: page numbers of each sequence in order, [batch, pages_per_sequence] int32, contiguous.
    data is then a pool [pages, kv_heads, records_per_page, format.nbytes]. Pages after the last
    record of a sequence are not read.
    """

    query: Tensor
    format: Format
    kv_heads: int
    records: int
    tokens: Tensor
    data: Tensor | None = None
    first: Tensor | None = None
    pages: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the pages: addresses follow from them, so a wrong type would read anywhere."""
        table = self.pages
        if table is not None and (table.dtype != torch.int32 or not table.is_contiguous()):
            raise ValueError(
                f"pages must be int32 and contiguous; got {table.dtype}, strides {table.stride()}. "
                "Use pages.int().contiguous()."
            )

    @classmethod
    def of_records(
        cls,
        query: Tensor,
        form: Format,
        data: Tensor,
        tokens: Tensor,
        first: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> Work:
        """Make the work of records in one piece per kv head, or in pages."""
        heads, records = data.shape[1:3]
        most = records * (1 if pages is None else pages.shape[1])
        return cls(query, form, heads, most, tokens, data, first, pages)

    @property
    def records_per_page(self) -> int:
        """Records per page; 0: records are in one piece."""
        return 0 if self.pages is None else self.data.shape[2]

    @property
    def heads(self) -> int:
        """Batch times kv_heads."""
        return self.query.shape[0] * self.kv_heads

    @property
    def group(self) -> int:
        """q heads per kv head."""
        return self.query.shape[1] // self.kv_heads

    @property
    def blocks(self) -> int:
        """Blocks of tokens per sequence, empty ones included."""
        return 1 if self.first is None else self.tokens.shape[1] - 1


@dataclass(frozen=True)
class Task:
    """One planned launch of a decode kernel.

    source: file of the kernel, whose function has the same name. macros: those of the source in
    addition to those of all sources. arguments: makes the structure from the fields of `Call`.
    shared_bytes: of a block; None: its rings. cluster: blocks of a cluster. ranges: numbers in fp32
    that the kernel needs at its argument of this name.
    """

    source: str
    work: Work
    at: Geometry
    macros: dict[str, int]
    arguments: Callable[..., Call] = Call
    cooperative: bool = False
    shared_bytes: int | None = None
    cluster: int = 1
    ranges: int = 0

    @property
    def units(self) -> int:
        """Shares of the work: a split of a block of a kv head each."""
        return self.work.heads * self.parts

    @property
    def grid(self) -> tuple[int, int, int]:
        """Numbers of blocks along parts, kv heads and sequences: no kernel has to divide."""
        return self.parts, self.work.kv_heads // self.at.sub_blocks, self.work.query.shape[0]

    @property
    def parts(self) -> int:
        """Shares of each kv head."""
        return self.work.blocks * self.at.splits
