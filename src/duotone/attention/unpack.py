"""Dense K and V of segments, for a later prompt's attention."""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.families import FAMILIES
from duotone.attention.refused import RefusedError
from duotone.cache.segments import PackedSegment, Segment


def states_of(segment: Segment) -> tuple[Tensor, Tensor]:
    """Dense K and V of a segment, by a kernel where there is one; anything past its lengths."""
    if not isinstance(segment, PackedSegment):
        return segment.key, segment.value
    key, value = by_kernel(segment) or _by_torch(segment)
    return segment.finished("key", key), segment.finished("value", value)


def by_kernel(segment: PackedSegment) -> tuple[Tensor, Tensor] | None:
    """Dequantized K and V as `PackedTensor.dequantize` makes them; None where no kernel does."""
    family = next(family for family in FAMILIES if family.holds(segment))
    if family.unpack is None or not has_kernels(segment.lengths.device):
        return None
    key, value = segment.key, segment.value
    dtype = torch.promote_types(key.decoded_dtype, value.decoded_dtype)
    try:
        dense = family.unpack(segment, dtype)
    except RefusedError:
        return None
    return key.rotated_back(dense[0]), value.rotated_back(dense[1])


def _by_torch(segment: PackedSegment) -> tuple[Tensor, Tensor]:
    own = segment.canonical()
    return own.key.dequantize(), own.value.dequantize()
