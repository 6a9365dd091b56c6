"""Queries as the packed keys of a segment want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.rotation import query_into_basis


class Wants(NamedTuple):
    """What a segment's packed keys want of the query: to be multiplied, and to be turned."""

    norm: Float[Tensor, "batch kv_heads head_dim"] | None
    transform: str | None

    @classmethod
    def of(cls, segment: Segment) -> Wants:
        """Nothing, of keys that are not packed."""
        if not isinstance(segment, PackedSegment):
            return cls(None, None)
        return cls(segment.key_norm, segment.key.spec.transform)


def segment_query(query: Tensor, wants: Wants) -> Tensor:
    """The query as a segment's packed keys want it: times their norm, in their basis; fp32 then."""
    if wants.norm is None and wants.transform is None:
        return query
    return query_into_basis(scaled_query(query, wants).float(), wants.transform).contiguous()


def scaled_query(query: Tensor, wants: Wants) -> Tensor:
    """The query times the keys' norm, in fp32 where they have one."""
    if wants.norm is None:
        return query
    heads = query.float().unflatten(1, (wants.norm.shape[1], -1))
    return (heads * wants.norm[:, :, None, None]).flatten(1, 2)


class SegmentQueries:
    """A call's query for each of its segments, made once for all that want the same."""

    def __init__(self, query: Tensor, make: Callable[[Tensor, Wants], Tensor]) -> None:
        self.query, self.make = query, make
        self._made: dict[tuple[int, str | None], Tensor] = {}

    def of(self, segment: Segment) -> Tensor:
        """The query as `segment` wants it."""
        wants = Wants.of(segment)
        at = (id(wants.norm), wants.transform)
        if at not in self._made:
            self._made[at] = self.make(self.query, wants)
        return self._made[at]
