"""Layouts of codes that kernels own: exact conversions from and to the canonical packing.

A kernel that wants its bytes in another order enters a pair of functions here; nothing else in the
package knows that order. Scales, zero-points and block tables are the same in every layout.

    "canonical"   `quant.packing`, [batch, kv_heads, tokens, bytes]: what the Triton kernels read
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from duotone.cache.packed import PackedTensor


@dataclass(frozen=True)
class KernelLayout:
    """A packed tensor whose codes a kernel has in an order of its own.

    codes: bytes in the layout `name`, of any shape. packed: everything else of the tensor; its own
    `codes` hold no tokens.
    """

    name: str
    codes: Tensor
    tokens: int
    packed: PackedTensor


@dataclass(frozen=True)
class Conversion:
    """to_kernel: a packed tensor -> the kernel's codes; to_canonical: its exact inverse."""

    to_kernel: Callable[[PackedTensor], Tensor]
    to_canonical: Callable[[KernelLayout], Tensor]


LAYOUTS: dict[str, Conversion] = {
    "canonical": Conversion(lambda packed: packed.codes, lambda layout: layout.codes),
}


def to_layout(packed: PackedTensor, name: str) -> KernelLayout:
    """The codes of `packed` in the layout `name`. Errors: ValueError for an unknown name."""
    codes = _conversion(name).to_kernel(packed)
    empty = replace(packed, codes=packed.codes[:, :, :0])
    return KernelLayout(name, codes, packed.tokens, empty)


def from_layout(layout: KernelLayout) -> PackedTensor:
    """Exact inverse of `to_layout`. Errors: ValueError for an unknown name."""
    codes = _conversion(layout.name).to_canonical(layout)
    return replace(layout.packed, codes=codes)


def _conversion(name: str) -> Conversion:
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {sorted(LAYOUTS)}; got {name!r}.")
    return LAYOUTS[name]
