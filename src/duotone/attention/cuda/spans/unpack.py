"""Dense K and V straight from span records: one launch, no other scratch.

The plain-torch reference is `Records.canonical`, then `PackedTensor.dequantize`; numbers equal
theirs bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.attention.cuda.packing import dense
from duotone.attention.cuda.spans.layout import RecordFormat
from duotone.attention.refused import RefusedError
from duotone.cache.segments import PackedSegment

SOURCE = "spans/unpack.cu"


def span_unpack(segment: PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of tokens in span records, [batch, kv_heads, tokens, head_dim] each.

    They are in their basis. Tokens past a sequence's end hold anything.
    Errors: `RefusedError` as `dense.check`, and for tensors that are views.
    """
    records, both = segment.records, (segment.key, segment.value)
    form, data = records.format, records.data
    dense.check("span records", form.head_dim, dtype)
    parameters = tuple((x.scale, x.zero_point, None) for x in both)
    if not all(x.is_contiguous() for x in (data, *(x for side in parameters for x in side[:2]))):
        raise RefusedError("span records, their scales and zero-points must be contiguous")
    blocks, own = segment.value.blocks, macros_of(form, dtype)
    return dense.unpack_tiles(SOURCE, "span_unpack", form, data, parameters, blocks, dtype, own)


def macros_of(form: RecordFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of spans/unpack.cu."""
    own = {
        "KB": form.key_bits,
        "VB": form.value_bits,
        "TILES": form.tiles,
        "SMALL_PARAMETERS": int(form.small),
        "PACKED_TILE_BYTES": form.nbytes,
    }
    return dense.macros_of(form.head_dim, dtype) | own
