"""Layout of visual spans in a cache: the kernels that pack them, or torch."""

from __future__ import annotations

from torch import Tensor

from duotone.attention.cuda.shared.filling import has_records
from duotone.attention.cuda.short.pack import short_pack
from duotone.attention.cuda.spans import searched
from duotone.attention.cuda.spans.layout import Records, format_of, span_layout
from duotone.attention.cuda.spans.pack import check, span_pack, total
from duotone.attention.refused import reason_against
from duotone.cache import PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec
from duotone.quant.checks import NOT_FINITE, is_finite


class SpanLayout:
    """Layout of visual spans in a cache on CUDA (`cache.pair.Layout`)."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> Records | None:
        """The records of K and V that are packed already."""
        return span_layout(key, value)

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V; None where torch has to, or to raise."""
        return stored(key, value, spec, piece) if key.is_cuda else None


def stored(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
    """Quantize by kernels, into records where spans fill these; None where torch has to.

    Spans that fill no records, and whose levels are searched, are in canonical order. Torch would
    take some 2,000 launches a tensor for the search. It takes a few for min/max.
    """
    is_plain = reason_against(check, spec, key, value) is None
    if not is_plain and reason_against(searched.check, spec, key, value):
        return None
    form = format_of(spec.key, spec.value, (key.shape[3], value.shape[3]))
    fills = has_records(form, piece.spans.split(spec.key.group))
    if not fills and (is_plain or not piece.spans.tokens):
        return None
    if not is_plain:
        return (searched.searched_pack if fills else short_pack)(key, value, spec, piece)
    pair = span_pack(key, value, spec, piece)
    return pair if is_finite(total(pair), NOT_FINITE) else None
