"""The family of spans: codes of one width, with scales of whole blocks of tokens."""

from __future__ import annotations

from torch import Tensor

from duotone.attention.cuda.shared.of_records import OfRecords
from duotone.attention.cuda.spans import decode, layout, pack, unpack
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.cache.segments import PackedSegment


def _at_call(query: Tensor, segment: PackedSegment, tokens: Tokens) -> None:
    if tokens.calibrated and not decode.is_resident(query, segment):
        raise RefusedError("score calibration needs all parts of a head on the device at once")


SPANS = Family(
    "cuda",
    "span records",
    kinds=("visual", "background"),
    honours=layout.HONOURS,
    takes=lambda tokens: not (tokens.key.classes or tokens.value.classes),
    holds=lambda segment: isinstance(segment.records, layout.Records),
    rule=OfRecords(layout.format_of, decode.warps_of, calibrates=True),
    at_call=_at_call,
    packs=pack.HONOURS,
    task=decode.span_task,
    layout=SpanLayout(),
    unpack=unpack.span_unpack,
)
