"""Dense K and V straight from class records: one launch, no other scratch.

The plain-torch reference is `ClassRecords.canonical`, then `PackedTensor.dequantize`; numbers equal
theirs bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.packing import dense
from duotone.cache.segments import PackedSegment

SOURCE = "classes/unpack.cu"


def class_unpack(segment: PackedSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of tokens in class records, [batch, kv_heads, tokens, head_dim] each.

    They are in their basis. Tokens past a sequence's end hold anything.
    Errors: `RefusedError` as `dense.check`.
    """
    records, spans = segment.records, segment.value.blocks
    form, data = records.format, records.data
    dense.check("class records", form.head_dim, dtype)
    parameters = (
        (records.key_scale, records.key_zero, records.key_order),
        (records.value_scale, records.value_zero, records.value_order),
    )
    own = macros_of(form, dtype)
    return dense.unpack_tiles(SOURCE, "class_unpack", form, data, parameters, spans, dtype, own)


def macros_of(form: ClassFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of classes/unpack.cu."""
    own = {**form.widths, "TILE_BYTES": form.tile_bytes}
    return dense.macros_of(form.head_dim, dtype) | own
