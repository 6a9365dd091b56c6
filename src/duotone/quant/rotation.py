"""Rotate channels of K, V, queries and outputs into the basis of quantization, and back.

There are two kinds: "hadamard", one orthogonal matrix for all heads, and calibrated bases, a matrix
per kv head (`quant.bases`), which need not be orthogonal.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.quant.bases import turn
from duotone.tools.kept import cached_once, kept

HADAMARD = "hadamard"
Heads = Float[Tensor, "batch heads tokens channels"]
Role = Literal["into", "back", "query"]


@cache
def hadamard(channels: int) -> Float[Tensor, "{channels} {channels}"]:
    """Normalised Sylvester-Hadamard matrix: symmetric, orthogonal, its own inverse; float64.

    Where `channels` is no power of two, the matrix is block diagonal. A block has the size of the
    largest power of two that divides `channels`: 80 channels have five blocks of 16.
    """
    size = channels & -channels
    block = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while block.shape[0] < size:
        block = torch.kron(block, step)
    return torch.block_diag(*[block] * (channels // size))


def into_basis(x: Heads, transform: str | None) -> Heads:
    """Rotate K or V into the basis of `transform`; heads are kv heads."""
    return _turned(x, transform, "into")


def out_of_basis(x: Heads, transform: str | None) -> Heads:
    """Rotate x back from the basis of `transform`; heads are kv heads or q heads."""
    return _turned(x, transform, "back")


def query_into_basis(query: Heads, transform: str | None) -> Heads:
    """Rotate queries to match keys in the basis of `transform`; heads are kv heads or q heads."""
    return _turned(query, transform, "query")


def _turned(x: Heads, transform: str | None, role: Role) -> Heads:
    if transform is None:
        return x
    return turn_heads(x, matrices(transform, role, x.shape[-1], x.dtype, x.device))


def turn_heads(
    x: Heads, matrices: Float[Tensor, "kv_heads channels channels"]
) -> Float[Tensor, "batch heads tokens channels"]:
    """Multiply every head by the matrix of its kv head; heads of a kv head are adjacent."""
    # One product per head covers all sequences: broadcast over the batch, matmul would copy the
    # matrices.
    by_kv_head = x.unflatten(1, (len(matrices), -1)).movedim(1, 0)
    turned = torch.bmm(by_kv_head.flatten(1, 3), matrices)
    return turned.view(by_kv_head.shape).movedim(0, 1).flatten(1, 2)


def matrices(
    transform: str, role: Role, channels: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "kv_heads {channels} {channels}"]:
    """Matrices by which `transform` rotates the kv heads; a single one where all are equal.

    role: "into" the basis, "back" from it, or for a "query". Matrices are kept per device: a copy
    from the host could not be part of a CUDA graph.
    """
    if transform == HADAMARD:
        return _hadamard_at(channels, dtype, device)
    return getattr(turn(transform, dtype, device), role)


@cached_once
def _hadamard_at(channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return kept(lambda: hadamard(channels).to(dtype=dtype, device=device)[None], device)
