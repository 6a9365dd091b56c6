"""Scale and rotate queries to match the packed keys of a segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from duotone.cache.segments import Segment
from duotone.quant.rotation import query_into_basis


class Wants(NamedTuple):
    """Norm and basis of a segment's packed keys, which the query must match."""

    norm: Float[Tensor, "batch kv_heads head_dim"] | None
    transform: str | None

    @classmethod
    def of(cls, segment: Segment) -> Wants:
        """Read both from a segment; (None, None) for keys that are not packed."""
        return cls(segment.key_norm, segment.bases[0])


def segment_query(query: Tensor, wants: Wants) -> Tensor:
    """Scale the query by the keys' norm and rotate it into their basis; fp32 if either is set."""
    if wants.norm is None and wants.transform is None:
        return query
    return query_into_basis(scaled_query(query, wants).float(), wants.transform).contiguous()


def scaled_query(query: Tensor, wants: Wants) -> Tensor:
    """Multiply the query by the keys' norm, in fp32 where they have one."""
    if wants.norm is None:
        return query
    heads = query.float().unflatten(1, (wants.norm.shape[1], -1))
    return (heads * wants.norm[:, :, None, None]).flatten(1, 2)


class SegmentQueries:
    """Queries of a call for its segments, made once per norm and basis."""

    def __init__(self, query: Tensor, make: Callable[[Tensor, Wants], Tensor]) -> None:
        self.query, self.make = query, make
        self._made: dict[tuple[int, str | None], Tensor] = {}

    def of(self, segment: Segment) -> Tensor:
        """Query that matches the keys of `segment`."""
        wants = Wants.of(segment)
        at = (id(wants.norm), wants.transform)
        if at not in self._made:
            self._made[at] = self.make(self.query, wants)
        return self._made[at]
