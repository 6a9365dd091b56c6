"""Orthogonal bases that a tensor's channels are turned into before quantization."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor


@cache
def hadamard(channels: int) -> Float[Tensor, "{channels} {channels}"]:
    """Normalised Sylvester-Hadamard matrix: symmetric, orthogonal, its own inverse; float64.

    Where `channels` is no power of two, one block of the largest power of two that divides it per
    part of the channels: 80 turns by five blocks of 16.
    """
    size = channels & -channels
    block = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while block.shape[0] < size:
        block = torch.kron(block, step)
    return torch.block_diag(*[block] * (channels // size))


def rotate(x: Float[Tensor, "*b channels"], transform: str | None) -> Float[Tensor, "*b channels"]:
    """x in the basis of `transform`, and back: every transform here is its own inverse."""
    if transform is None:
        return x
    return x @ _hadamard_at(x.shape[-1], x.dtype, x.device)


@cache
def _hadamard_at(channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept per device: a copy from the host could not be part of a CUDA graph."""
    return hadamard(channels).to(dtype=dtype, device=device)
