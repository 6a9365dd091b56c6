"""Queries as the packed keys of a segment want them."""

from __future__ import annotations

from torch import Tensor

from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.rotation import query_into_basis


def segment_query(query: Tensor, segment: Segment) -> Tensor:
    """The query as a segment's packed keys want it: times their norm, in their basis; fp32 then."""
    norm = segment.key_norm if isinstance(segment, PackedSegment) else None
    transform = segment.key.spec.transform if isinstance(segment, PackedSegment) else None
    if norm is None and transform is None:
        return query
    wide = query.float()
    if norm is not None:
        heads = wide.unflatten(1, (norm.shape[1], -1))
        wide = (heads * norm[:, :, None, None]).flatten(1, 2)
    return query_into_basis(wide, transform).contiguous()
