"""Multiply rows by the matrix of their kv head, in fp32: queries into the basis of their keys.

The plain-torch reference of `rotate_queries` is `quant.rotation.turn_heads`, in fp32 as well.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.attention.cuda.shared.geometry import multiprocessors
from duotone.attention.cuda.shared.launch import OVERLAP
from duotone.attention.cuda.shared.runtime import Launch, entry, kernel
from duotone.attention.cuda.shared.work import QUERY_TYPES
from duotone.attention.rotated import Wants, scaled_query, segment_query
from duotone.quant.rotation import Role, matrices
from duotone.tools.kept import cached_once, kept

SOURCE = "rotate/queries.cu"
# Rows of the matrix that a thread keeps, by head_dim.
DEPTHS = {64: 8, 80: 8, 96: 8, 128: 16, 256: 16}
MAX_COLUMNS = 128
# Alignment of the four numbers that a thread reads.
ALIGNMENT_BYTES = 16
# Rows of a block: the fewest with which all blocks run on the device at once.
ROWS = (1, 2, 4, 8)


class Arguments(ctypes.Structure):
    """`Arguments` of rotate/queries.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "matrices", "out")),
        *((name, ctypes.c_int) for name in ("kv_heads", "rows")),
    )


@dataclass(frozen=True)
class Tiles:
    """Cut of a product: blocks in all, and the sizes of one for rotate/product.cuh."""

    blocks: int
    rows: int
    columns: int
    depth: int
    slices: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.slices * self.columns // 4

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums: a number of each slice for every row and column."""
        return 4 * self.slices * self.rows * self.columns

    @property
    def macros(self) -> dict[str, int]:
        """Macros of rotate/product.cuh."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}


@cache
def tiles(head_dim: int, kv_heads: int, rows: int, sms: int) -> Tiles:
    """Choose the cut for `rows` q heads of every kv head; head_dim is one of `DEPTHS`."""
    columns, depth = min(head_dim, MAX_COLUMNS), DEPTHS[head_dim]
    heads = kv_heads * (head_dim // columns)
    blocks = {of_block: heads * -(-rows // of_block) for of_block in ROWS}
    fitting = (of_block for of_block in ROWS if blocks[of_block] <= sms)
    of_block = next(fitting, ROWS[-1])
    return Tiles(blocks[of_block], of_block, columns, depth, head_dim // depth)


@cached_once
def kernel_matrices(
    transform: str, role: Role, channels: int, device: torch.device
) -> Float[Tensor, "kv_heads {channels} {channels}"]:
    """Make `matrices` in fp32, kept for every stream of a device."""
    # Kernels read them before they wait for the launch before them; `kept` has waited.
    return kept(lambda: matrices(transform, role, channels, torch.float32, device), device)


def rotated_query(query: Tensor, wants: Wants) -> Tensor:
    """Make `segment_query` by the kernel, where it supports the shape. query: contiguous."""
    channels = query.shape[3]
    if wants.transform is None or channels not in DEPTHS:
        return segment_query(query, wants)
    made = kernel_matrices(wants.transform, "query", channels, query.device)
    return rotate_queries(scaled_query(query, wants), made)


def rotate_queries(
    query: Float[Tensor, "batch q_heads 1 channels"],
    matrices: Float[Tensor, "kv_heads channels channels"],
) -> Float[Tensor, "batch q_heads 1 channels"]:
    """Multiply every q head by the matrix of its kv head, in fp32; both are contiguous."""
    if query.data_ptr() % ALIGNMENT_BYTES:
        query = query.clone()
    heads, channels = matrices.shape[:2]
    batch, group = query.shape[0], query.shape[1] // heads
    at = tiles(channels, heads, batch * group, multiprocessors(query.device))
    out = torch.empty_like(query, dtype=torch.float32)
    given = Arguments(
        query=query.data_ptr(),
        matrices=matrices.data_ptr(),
        out=out.data_ptr(),
        kv_heads=heads,
        rows=batch * group,
    )
    macros = {
        "CHANNELS": channels,
        "G": group,
        "QUERY": QUERY_TYPES[query.dtype],
        "OUT": QUERY_TYPES[out.dtype],
        "OVERLAP": int(OVERLAP),
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
        **at.macros,
    }
    shared_bytes = 4 * at.rows * channels + at.sums_bytes
    launch = Launch(at.blocks, at.threads, shared_bytes, overlap=OVERLAP)
    function = entry(SOURCE)
    kernel(SOURCE, function, tuple(macros.items()), query.device)(launch, given)
    return out
