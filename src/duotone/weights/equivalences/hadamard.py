"""Online Hadamard transform: the choice for a size, the reference, and the weight's side.

    y = (H_m (x) H_p) x / sqrt(m p)      per block of m * p channels, after zero padding

m: order of a base matrix with row 0 all +1 (`weights.equivalences.hadamard_bases`), p: a power of
two (Sylvester). The transform T is orthogonal, so that W x = (W T^T) (T x). A linear after T keeps
its output if `transform` is applied to the rows of its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.tools.kept import cached_once, kept
from duotone.weights.equivalences.hadamard_bases import LARGEST_BASE, base_matrix, has_base

# What is given up for one transform over all channels: growth of the GEMM after it.
LARGEST_GROWTH = 1 / 16
# Smaller blocks spread an outlier over too few channels to be worth a pass over the activation.
SMALLEST_BLOCK = 64
# Padded sizes suit the kernels' tiles.
PADDED_MULTIPLE = 64


@dataclass(frozen=True)
class HadamardPlan:
    """A transform of `size` channels: zero-padded to `padded` = blocks * base * power."""

    size: int
    padded: int
    blocks: int
    base: int
    power: int

    def __post_init__(self) -> None:
        if self.padded != self.blocks * self.base * self.power or self.padded < self.size:
            raise ValueError(
                "a plan needs padded = blocks * base * power >= size; got "
                f"padded={self.padded}, blocks={self.blocks}, base={self.base}, "
                f"power={self.power}, size={self.size}. Use plan_hadamard(size)."
            )

    @property
    def block(self) -> int:
        """Channels that are mixed with each other."""
        return self.base * self.power


def plan_hadamard(size: int, pad: bool = True) -> HadamardPlan:
    """The cheapest transform of `size` channels.

    Exact if some m * 2^k with m <= 256 is the size. Else padded where that grows the size by
    at most 1/16. Else blocks of at least 64 channels. Else padded at any cost. Among
    equals the smallest base wins: a transform costs m + log2(p) additions per channel.
    pad=False (--no-pad): exact or blocks.
    Errors: ValueError where nothing fits.
    """
    if size < 1:
        raise ValueError(f"a transform needs at least one channel; got size={size}.")
    found = exact_plan(size)
    if found is not None:
        return found
    padded = _padded(size) if pad else None
    if padded is not None and padded.padded <= size * (1 + LARGEST_GROWTH):
        return padded
    found = _blocks(size) or padded
    if found is None:
        raise ValueError(_nothing_fits(size))
    return found


def _nothing_fits(size: int) -> str:
    odd = size // (size & -size)
    return (
        f"no Hadamard transform covers {size} = {odd} * {size // odd} channels with pad=False: "
        f"exact needs m * 2^k with a known m <= {LARGEST_BASE}, "
        f"blocks need at least {SMALLEST_BLOCK} channels each. To go on, allow padding."
    )


def exact_plan(size: int) -> HadamardPlan | None:
    """One transform over all channels without padding; None where no known matrix has the size."""
    factors = _factors(size)
    return factors and HadamardPlan(size, size, 1, *factors)


def _factors(size: int) -> tuple[int, int] | None:
    """The smallest base m with size = m * power of two, and that power."""
    power = size & -size
    while power:
        if size // power <= LARGEST_BASE and has_base(size // power):
            return size // power, power
        power //= 2
    return None


def _padded(size: int) -> HadamardPlan | None:
    padded = -(-size // PADDED_MULTIPLE) * PADDED_MULTIPLE
    # The next power of two ends the search.
    while (factors := _factors(padded)) is None:
        padded += PADDED_MULTIPLE
    return HadamardPlan(size, padded, 1, *factors)


def _blocks(size: int) -> HadamardPlan | None:
    """Blocks of the largest power of two, without a base; else as few blocks as bases allow."""
    power = size & -size
    if power >= SMALLEST_BLOCK:
        return HadamardPlan(size, size, size // power, 1, power)
    for count in range(1, size // SMALLEST_BLOCK + 1):
        factors = None if size % count else _factors(size // count)
        if factors is not None:
            return HadamardPlan(size, size, count, *factors)
    return None


def transform(x: Tensor, plan: HadamardPlan) -> Tensor:
    """T x over the last dimension: [..., size] -> [..., padded], in x's type, float32 inside.

    A tensor without numbers gives one without numbers.
    Errors: ValueError for another number of channels.
    """
    if x.shape[-1] != plan.size:
        raise ValueError(
            f"the plan transforms {plan.size} channels; got a tensor {tuple(x.shape)}. "
            "Make a plan for this size."
        )
    if x.is_meta:
        return x.new_empty((*x.shape[:-1], plan.padded))
    wide = F.pad(_at_least_float32(x), (0, plan.padded - plan.size))
    return _transformed(wide, plan, "ij,...jp->...ip").to(x.dtype)


def _transformed(x: Tensor, plan: HadamardPlan, base_product: str) -> Tensor:
    """Base and butterflies over [..., padded], which commute: T^T differs only in the base."""
    x = x.unflatten(-1, (plan.blocks, plan.base, plan.power))
    if plan.base > 1:
        # Autocast would round the products to 16 bit.
        with torch.autocast(x.device.type, enabled=False):
            x = torch.einsum(base_product, base_at(plan.base, x.dtype, x.device), x)
    return (_fast_walsh(x) / plan.block**0.5).flatten(-3)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cached_once
def base_at(m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H_m, kept per device: a copy from the host could not be part of a CUDA graph."""
    return kept(lambda: base_matrix(m).to(dtype=dtype, device=device), device)


def _fast_walsh(x: Tensor) -> Tensor:
    """Sylvester's H_p over the last dimension by butterflies, unnormalised."""
    size, step = x.shape[-1], 1
    while step < size:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    return x


def transform_back(y: Tensor, plan: HadamardPlan) -> Tensor:
    """T^T y without the padding: [..., padded] -> [..., size]."""
    if y.shape[-1] != plan.padded:
        raise ValueError(
            f"the plan's transform has {plan.padded} channels; got a tensor {tuple(y.shape)}."
        )
    x = _transformed(_at_least_float32(y), plan, "ji,...jp->...ip")[..., : plan.size]
    return x.to(y.dtype)
