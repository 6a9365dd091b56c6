"""Specs with a field more, `toy`, in each role that a field may have, and in none."""

from dataclasses import dataclass

from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.quant.spec_base import decoded, of_policy, stored


@dataclass(frozen=True)
class DecodedTensor(TensorSpec):
    """A tensor's spec with one more field that changes how codes are read."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor's spec with one more field that changes which codes are stored."""

    toy: int = stored(0)


@dataclass(frozen=True)
class DecodedPair(KVSpec):
    """A pair's spec with one more decoded field."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class DecodedCache(CacheSpec):
    """A cache's spec with one more decoded field."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class WithoutRole(CacheSpec):
    """A cache's spec with one more field whose role nobody has declared."""

    toy: int = 0


@dataclass(frozen=True)
class PolicyCache(CacheSpec):
    """A cache's spec with one more field that chooses tokens."""

    toy: int = of_policy(0)
