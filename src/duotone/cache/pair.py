"""Packed K and V of the same tokens, in canonical order or in a kernel's layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ledger import Piece
from duotone.cache.packed import PackedTensor
from duotone.cache.packing import pack_tensor
from duotone.cache.ragged import Lengths, Move
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import unchecked

Packed = tuple[PackedTensor, PackedTensor]
# The last axis are channels, of K and V as many but in latent caches.
States = Float[Tensor, "batch kv_heads tokens _"]


@runtime_checkable
class LaidOut(Protocol):
    """K and V in an order that a kernel owns: codes, and other parts that the kernel keeps."""

    @property
    def shape(self) -> torch.Size:
        """(batch, kv_heads)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes, filling included."""
        ...

    @property
    def params_bytes(self) -> int:
        """Bytes of `nbytes` that are no codes."""
        ...

    @property
    def by_head(self) -> dict[str, Tensor]:
        """Tensors [batch, kv_heads, ...], by the names of their fields."""
        ...

    def canonical(self, key: PackedTensor, value: PackedTensor) -> Packed:
        """Convert to canonical order, exactly. key, value: parts that the kernel does not keep."""
        ...

    def left(self, key: PackedTensor, value: PackedTensor) -> Packed:
        """Parts of both that the kernel does not keep."""
        ...

    def append(self, other: LaidOut, held: BlockTable, more: BlockTable) -> LaidOut | None:
        """Append the tokens of `other`, in blocks `more`, after ours in blocks `held`, by copying.

        None where copying is not enough; the caller then goes by way of the canonical order.
        """
        ...

    def rows(self, index: Tensor) -> LaidOut:
        """Pick sequences."""
        ...


@runtime_checkable
class Growing(LaidOut, Protocol):
    """Stream with room for more tokens, for `StaticStore`; layers can share its codes."""

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors that `write` changes."""
        ...

    def with_codes(self, which: Literal["key", "value"], source: Growing) -> Growing:
        """Bring in codes that another layer keeps, without a copy."""
        ...

    def widened(self, tokens: int) -> Growing:
        """Copy the tokens into a buffer for `tokens` tokens."""
        ...

    def write(
        self,
        states: tuple[Tensor, Tensor],
        leaving: Move,
        full: Tensor,
        where: Lengths,
        key_norm: Tensor | None,
        spec: KVSpec,
    ) -> None:
        """Quantize a group of dense K and V of the sequences that are `full`, from token `where`.

        leaving: the tokens of the group. Shapes are fixed and nothing waits for the host.
        """
        ...

    def close_gap(
        self, states: tuple[Tensor, Tensor], source: Tensor, target: Tensor, full: Tensor
    ) -> None:
        """Move dense tokens to the slots that a group has left; `cache.static.move_tokens`."""
        ...


# From packed K and V to a kernel's order; None where the kernel has no such format.
LayOut = Callable[[PackedTensor, PackedTensor], LaidOut | None]


@runtime_checkable
class Layout(Protocol):
    """Order that a kernel owns, and the conversion of K and V into it."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> LaidOut | None:
        """Convert packed K and V; None where the kernel has no such format."""
        ...

    def pack(self, key: States, value: States, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize and lay out at once, as `PackedPair.pack` would; None where a kernel cannot."""
        ...


@runtime_checkable
class StreamLayout(Layout, Protocol):
    """`Layout` of streams."""

    def empty(
        self, spec: KVSpec, shape: tuple[int, int], channels: tuple[int, int], device: torch.device
    ) -> Growing | None:
        """Make a stream without tokens. shape: (batch, kv_heads). channels: of K and of V."""
        ...

    def sharing(self, lends: Collection[str], borrows: Collection[str]) -> StreamLayout:
        """Layout for a layer that shares codes, which are then stored separately.

        lends: "key", "value": other layers read these codes. borrows: another layer keeps these.
        """
        ...


@dataclass(frozen=True)
class Layouts:
    """Layouts of a layer's stores for decode kernels; None: canonical order."""

    visual: Layout | None = None
    background: Layout | None = None
    stream: StreamLayout | None = None


@dataclass(frozen=True)
class PackedPair:
    """Packed K and V of the same tokens.

    records: the parts in a kernel's layout; key and value then have the rest.
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
        laid = self.records
        kept = 0 if laid is None else laid.nbytes - laid.params_bytes
        return kept + self.key.codes_bytes + self.value.codes_bytes

    @property
    def params_bytes(self) -> int:
        """Bytes of everything else."""
        kept = 0 if self.records is None else self.records.params_bytes
        return kept + self.key.params_bytes + self.value.params_bytes

    def laid_out(self, layout: LayOut) -> PackedPair:
        """Convert to a kernel's order, where the kernel has one for this pair."""
        if self.records is not None:
            return self
        with unchecked():  # Codes that were packed fit.
            records = layout(self.key, self.value)
        if records is None:
            return self
        return PackedPair(*records.left(self.key, self.value), records)

    def canonical(self) -> PackedPair:
        """Convert to canonical order."""
        if self.records is None:
            return self
        with unchecked():  # Codes that were packed fit.
            return PackedPair(*self.records.canonical(self.key, self.value))

    def without_codes(self, parts: Collection[str]) -> PackedPair:
        """Drop the codes of K or V that another layer keeps; records never have them."""
        if self.records is not None:
            return self
        return replace(self, **{which: getattr(self, which).without_codes() for which in parts})

    def with_codes(self, which: Literal["key", "value"], source: PackedPair) -> PackedPair:
        """Bring in the codes of K or V that another layer keeps, without a copy.

        Both have one order, except at the step at which a layer of a run gives up a kernel's order.
        """
        if self.records is not None and source.records is not None:
            return replace(self, records=self.records.with_codes(which, source.records))
        own, other = self.canonical(), source.canonical()
        return replace(own, **{which: getattr(own, which).with_codes(getattr(other, which))})

    def append(self, other: PackedPair, join: Move) -> PackedPair:
        """Join the tokens of `other` after ours, in a kernel's order if both have it."""
        records = None
        if self.records is not None and other.records is not None:
            records = self.records.append(other.records, self.key.blocks, other.key.blocks)
        own, new = (self, other) if records else (self.canonical(), other.canonical())
        key, value = own.key.append(new.key, join), own.value.append(new.value, join)
        return PackedPair(key, value, records)

    def truncate(self, lengths: Lengths) -> PackedPair:
        """Keep the first `lengths[b]` tokens, in canonical order."""
        own = self.canonical()
        return PackedPair(own.key.truncate(lengths), own.value.truncate(lengths))

    def rows(self, index: Tensor) -> PackedPair:
        """Pick sequences."""
        records = None if self.records is None else self.records.rows(index)
        return PackedPair(self.key.rows(index), self.value.rows(index), records)
