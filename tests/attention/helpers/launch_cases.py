"""Segments in records, as launches take them."""

from dataclasses import replace

from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.pair import PackedPair

from cases import Case, build

LENGTHS = (9000, 300)


def records_of(case: Case, layout=span_layout):
    """(query, segments), the packed one in records."""
    query, (first, *rest) = build(case)
    pair = PackedPair(first.key, first.value).laid_out(layout)
    return query, [replace(first, key=pair.key, value=pair.value, records=pair.records), *rest]


def span_of(segment) -> span_decode.Span:
    key, value = segment.key, segment.value
    params = (key.scale, key.zero_point, value.scale, value.zero_point)
    return span_decode.Span(segment.records, *params, key.blocks.offsets)
