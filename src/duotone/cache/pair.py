"""Packed K and V of the same tokens, in canonical order or as a kernel has laid them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from duotone.cache.ledger import Piece
from duotone.cache.packed import PackedTensor, pack_tensor
from duotone.cache.ragged import Lengths, Move
from duotone.quant import KVSpec, TensorSpec

States = Float[Tensor, "batch kv_heads tokens channels"]


@runtime_checkable
class LaidOut(Protocol):
    """Codes of K and V in an order that a kernel owns."""

    @property
    def with_parameters(self) -> bool:
        """Scales and the like are in it, too: the packed tensors keep none."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, kv_heads)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes, filling included."""
        ...

    def canonical(
        self, key: PackedTensor, value: PackedTensor
    ) -> tuple[PackedTensor, PackedTensor]:
        """Both, complete, with codes in canonical order, exactly."""
        ...

    def rows(self, index: Tensor) -> LaidOut:
        """Pick sequences."""
        ...


# From packed K and V to their codes in a kernel's order; None where the kernel has no such format.
Layout = Callable[[PackedTensor, PackedTensor], LaidOut | None]


def with_canonical_codes(
    key: PackedTensor, value: PackedTensor, records: LaidOut | None
) -> tuple[PackedTensor, PackedTensor]:
    """K and V with codes of their own, whoever holds them now."""
    if records is None:
        return key, value
    return records.canonical(key, value)


@dataclass(frozen=True)
class PackedPair:
    """Packed K and V of the same tokens.

    records: their codes where a kernel has laid them out; key and value then have none, and no
        parameters where those are in the records, too.
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

    def laid_out(self, layout: Layout) -> PackedPair:
        """The same with codes in a kernel's order, where it has one for them."""
        records = layout(self.key, self.value) if self.records is None else None
        if records is None:
            return self
        if records.with_parameters:
            return PackedPair(self.key.without_parts(), self.value.without_parts(), records)
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
