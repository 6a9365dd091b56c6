"""Packed K and V of the same tokens, in canonical order or as a kernel has laid them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from duotone.cache.ledger import Piece
from duotone.cache.packed import Codes, PackedTensor, pack_tensor
from duotone.cache.ragged import Lengths, Move
from duotone.quant import KVSpec, TensorSpec

States = Float[Tensor, "batch kv_heads tokens channels"]


@runtime_checkable
class LaidOut(Protocol):
    """Codes of K and V in an order that a kernel owns."""

    @property
    def nbytes(self) -> int:
        """Bytes, filling included."""
        ...

    def canonical(self, key: PackedTensor, value: PackedTensor) -> tuple[Codes, Codes]:
        """The packed codes of both in canonical order, exactly."""
        ...

    def rows(self, index: Tensor) -> LaidOut:
        """Pick sequences."""
        ...


# From packed K and V to their codes in a kernel's order; None where the kernel has no such format.
LayOut = Callable[[PackedTensor, PackedTensor], LaidOut | None]


@runtime_checkable
class Layout(Protocol):
    """An order of codes that a kernel owns, and how dense K and V get there."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> LaidOut | None:
        """From packed K and V; None where the kernel has no such format."""
        ...

    def pack(self, key: States, value: States, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """`PackedPair.pack` with codes laid out, at once; None where a kernel cannot."""
        ...


def with_canonical_codes(
    key: PackedTensor, value: PackedTensor, records: LaidOut | None
) -> tuple[PackedTensor, PackedTensor]:
    """K and V with codes of their own, whoever holds them now."""
    if records is None:
        return key, value
    codes = records.canonical(key, value)
    return replace(key, codes=codes[0]), replace(value, codes=codes[1])


@dataclass(frozen=True)
class PackedPair:
    """Packed K and V of the same tokens.

    records: their codes where a kernel has laid them out; key and value then have none.
    """

    key: PackedTensor
    value: PackedTensor
    records: LaidOut | None = None

    @classmethod
    def pack(cls, key: States, value: States, spec: KVSpec, piece: Piece) -> PackedPair:
        """Quantize the tokens that `piece` takes out of dense K and V."""

        def packed(x: Tensor, tensor: TensorSpec) -> PackedTensor:
            return pack_tensor(piece.take.apply(x), tensor, piece.spans, piece.decoding)

        return cls(packed(key, spec.key), packed(value, spec.value))

    @property
    def codes_bytes(self) -> int:
        """Bytes of codes and planes of signs."""
        kept = 0 if self.records is None else self.records.nbytes
        return kept + self.key.codes_bytes + self.value.codes_bytes

    @property
    def params_bytes(self) -> int:
        """Bytes of everything else."""
        return self.key.params_bytes + self.value.params_bytes

    def laid_out(self, layout: LayOut) -> PackedPair:
        """The same with codes in a kernel's order, where it has one for them."""
        records = layout(self.key, self.value) if self.records is None else None
        if records is None:
            return self
        return PackedPair(self.key.without_codes(), self.value.without_codes(), records)

    def canonical(self) -> PackedPair:
        """The same with codes in canonical order."""
        return PackedPair(*with_canonical_codes(self.key, self.value, self.records))

    def append(self, other: PackedPair, join: Move) -> PackedPair:
        """Join the tokens of `other` behind ours, in canonical order."""
        own, other = self.canonical(), other.canonical()
        return PackedPair(own.key.append(other.key, join), own.value.append(other.value, join))

    def truncate(self, lengths: Lengths) -> PackedPair:
        """Keep the first `lengths[b]` tokens, in canonical order."""
        own = self.canonical()
        return PackedPair(own.key.truncate(lengths), own.value.truncate(lengths))

    def rows(self, index: Tensor) -> PackedPair:
        """Pick sequences."""
        records = None if self.records is None else self.records.rows(index)
        return PackedPair(self.key.rows(index), self.value.rows(index), records)
