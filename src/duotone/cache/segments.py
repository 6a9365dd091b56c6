"""Segments that attention reads: K and V of the same tokens, packed or in 16 bit.

Key order does not matter to decode attention (keys carry their rotation), so a cache is a list of
segments. A token belongs to exactly one segment, padding to none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.cache.lag import Lagging
from duotone.cache.packed import PackedTensor
from duotone.cache.pair import LaidOut, States
from duotone.cache.ragged import Lengths
from duotone.quant import TensorSpec
from duotone.quant.checks import unchecked


@dataclass(frozen=True)
class PackedSegment:
    """Packed tokens; `visual` ones take part in score calibration.

    lengths: [batch] valid tokens. mask: [batch, queries, tokens], True where a query may see the
    token, or None where every query sees every valid token.
    key_norm: the packed keys are keys divided by it; queries are multiplied by it instead.
    records: the parts in a kernel's layout; key and value then have the rest.
    exact: V of the newest tokens, which stands in for its codes.
    """

    key: PackedTensor
    value: PackedTensor
    lengths: Lengths
    visual: bool = False
    mask: Bool[Tensor, "batch queries tokens"] | None = None
    key_norm: Float[Tensor, "batch kv_heads head_dim"] | None = None
    records: LaidOut | None = None
    exact: Lagging | None = None

    def canonical(self) -> PackedSegment:
        """Convert to canonical order."""
        if self.records is None:
            return self
        with unchecked():  # Codes that were packed fit.
            key, value = self.records.canonical(self.key, self.value)
        return replace(self, key=key, value=value, records=None)

    @property
    def kept_as(self) -> tuple[TensorSpec, TensorSpec]:
        """Quantizers of K and V."""
        return self.key.spec, self.value.spec

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of K and of V."""
        return self.key.head_dim, self.value.head_dim

    @property
    def bases(self) -> tuple[str | None, str | None]:
        """Transforms of K and of V."""
        return self.key.spec.transform, self.value.spec.transform

    @property
    def heads(self) -> tuple[int, int]:
        """(batch, kv_heads)."""
        return tuple((self.key.scale if self.records is None else self.records).shape[:2])

    @property
    def tokens(self) -> int:
        """Width of the token axis."""
        return self.key.tokens

    def states(self, which: Literal["key", "value"]) -> States:
        """Dequantize K or V, with the norm of keys multiplied back in."""
        return self.finished(which, getattr(self.canonical(), which).dequantize())

    def finished(self, which: Literal["key", "value"], decoded: States) -> States:
        """Dequantized K or V with what is stored beside its codes: norms, exact tokens."""
        if which == "value" and self.exact is not None:
            return self.exact.into(decoded, self.lengths)
        if which == "value" or self.key_norm is None:
            return decoded
        return (decoded * self.key_norm[:, :, None]).to(decoded.dtype)


@dataclass(frozen=True)
class DenseSegment:
    """Tokens in the model's dtype; only the first `lengths[b]` of them exist.

    key_norm, records, bases: those of a packed segment, which dense tokens do not have.
    """

    key_norm: ClassVar[None] = None
    records: ClassVar[None] = None
    bases: ClassVar[tuple[None, None]] = (None, None)

    key: Float[Tensor, "batch kv_heads tokens key_dim"]
    value: Float[Tensor, "batch kv_heads tokens value_dim"]
    lengths: Lengths
    visual: bool = False
    mask: Bool[Tensor, "batch queries tokens"] | None = None

    def canonical(self) -> DenseSegment:
        """Return self: dense tokens have one order."""
        return self

    @property
    def heads(self) -> tuple[int, int]:
        """(batch, kv_heads)."""
        return tuple(self.key.shape[:2])

    @property
    def kept_as(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of K and V."""
        return self.key.dtype, self.value.dtype

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of K and of V."""
        return self.key.shape[3], self.value.shape[3]

    @property
    def tokens(self) -> int:
        """Width of the token axis."""
        return self.key.shape[2]

    def states(self, which: Literal["key", "value"]) -> States:
        """K or V as stored."""
        return getattr(self, which)


Segment = PackedSegment | DenseSegment
