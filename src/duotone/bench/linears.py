"""Matrix products of a model: 16 bit, or MQuant's integers, static and fused.

A model calls for matrices and for the operations before a product. Only this file knows the type of
a product's input (codes or 16 bit).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.equivalences.hadamard import base_at, plan_hadamard
from duotone.weights.modules.gate import Gate
from duotone.weights.modules.gated import gated_product, pays
from duotone.weights.modules.linear import linear_int
from duotone.weights.modules.online_hadamard import hadamard_quantize
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quantize_rows import norm_quantize, quantize

EPSILON = 1e-5
# Range of the static scale: random numbers with a variance of one rarely exceed it.
STATIC_RANGE = 4.5


class Linears(Protocol):
    """Matrices and products of one kind; x: [rows, columns]."""

    def matrix(self, rows: int, columns: int) -> Any:
        """A random one [rows, columns] that keeps the variance of its inputs."""

    def product(self, entering: Tensor, matrix: Any) -> Tensor:
        """`entering` times the matrix, 16 bit."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Input of a product after a norm."""

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(x + more, input of a product after its norm); x may be overwritten."""

    def gated(self, entering: Tensor, matrix: Any) -> Tensor:
        """Input of a product after silu(first half) * second half of `product`."""

    def plain(self, x: Tensor) -> Tensor:
        """Input of a product from x itself."""


class DenseLinears:
    """Products of 16 bit; elementwise operations are compiled if `fused`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, fused: bool) -> None:
        self.device, self.dtype, self.ops = device, dtype, elementwise(fused)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """As `Linears` has it."""
        weights = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weights.normal_(std=columns**-0.5)

    def product(self, entering: Tensor, matrix: Tensor) -> Tensor:
        """As `Linears` has it."""
        return F.linear(entering, matrix)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `Linears` has it."""
        return rms_norm(x, weight)

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As `Linears` has it."""
        return self.ops.add_norm(x, more, weight)

    def gated(self, entering: Tensor, matrix: Tensor) -> Tensor:
        """As `Linears` has it."""
        return self.ops.gate(self.product(entering, matrix))

    def plain(self, x: Tensor) -> Tensor:
        """As `Linears` has it."""
        return x


class IntegerLinears:
    """MQuant's static integers: one kernel quantizes the output of a norm or a gate.

    bits: 8 or 4, of weights; activations have 8. gate_size: channels after the gate, which are
    transformed by an online Hadamard.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, bits: int, gate_size: int) -> None:
        self.device, self.dtype, self.bits = device, dtype, bits
        self.scale = torch.full((1,), STATIC_RANGE / 127, device=device)
        self.plan = plan_hadamard(gate_size, "exact")
        base = self.plan.base
        self.base = None if base == 1 else base_at(base, torch.int8, device)

    def matrix(self, rows: int, columns: int) -> PackedWeight:
        """As `Linears` has it."""
        low, high, dtype = (0, 256, torch.uint8) if self.bits == 4 else (-128, 128, torch.int8)
        size = (rows, columns * self.bits // 8)
        codes = torch.randint(low, high, size, dtype=dtype, device=self.device)
        # Uniform codes spread 2^bits / sqrt(12).
        scale = 12**0.5 / 2**self.bits * columns**-0.5
        return PackedWeight(codes, self.bits, torch.full((rows,), scale, device=self.device))

    def product(self, entering: Tensor, matrix: PackedWeight) -> Tensor:
        """As `Linears` has it."""
        return linear_int(entering, self.scale, matrix, dtype=self.dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `Linears` has it."""
        return norm_quantize(x, self.scale, eps=EPSILON, weight=weight).codes

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As `Linears` has it."""
        given = {"eps": EPSILON, "weight": weight, "residual": x}
        return x, norm_quantize(more, self.scale, **given).codes

    def gated(self, entering: Tensor, matrix: PackedWeight) -> Tensor:
        """As `Linears` has it; gate, up and their product in one launch where that pays."""
        plan, both = self.plan, Gate.halves(matrix, "silu")
        given = (self.scale, plan.blocks, self.base, plan.power)
        if pays(len(entering), both):
            joined = gated_product(entering, self.scale, both, dtype=self.dtype)
            return hadamard_quantize(joined, *given)[0].codes
        gate, up = self.product(entering, matrix).chunk(2, -1)
        return hadamard_quantize(gate, *given, activation="silu", up=up)[0].codes

    def plain(self, x: Tensor) -> Tensor:
        """As `Linears` has it."""
        return quantize(x, self.scale).codes


@dataclass(frozen=True)
class Elementwise:
    """Operations between products, as functions of tensors."""

    rotate: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def elementwise(fused: bool) -> Elementwise:
    """Compile each function to one launch instead of seven, two and two; for all caches alike."""
    if not fused:
        return Elementwise(_rotate, _gate, _add_norm)
    from duotone.bench.rotary import rotate

    return Elementwise(rotate, torch.compile(_gate), torch.compile(_add_norm))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of rows [rows, hidden]."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, q_heads: int) -> tuple[Tensor, Tensor]:
    """Rotate as `rotary.rotate` does, in plain torch."""
    query, key = (_rotated(part, cos, sin) for part in x.tensor_split([q_heads], 1))
    return query, key


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _add_norm(x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, its RMS norm) of rows [rows, hidden]."""
    total = x + more
    return total, rms_norm(total, weight)


def _gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
