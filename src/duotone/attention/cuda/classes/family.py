"""The family of classes: codes of channels of unequal bits."""

from __future__ import annotations

from duotone.attention.cuda.classes import decode, format, layout, pack
from duotone.attention.cuda.shared.of_records import OfRecords
from duotone.attention.family import Family, Tokens
from duotone.cache.segments import PackedSegment, Segment


def _takes(tokens: Tokens) -> bool:
    return bool(tokens.key.classes or tokens.value.classes)


def _holds(segment: Segment) -> bool:
    return isinstance(segment, PackedSegment) and isinstance(segment.records, layout.ClassRecords)


CLASSES = Family(
    "cuda",
    "class records",
    kinds=("visual", "background"),
    honours=format.HONOURS,
    takes=_takes,
    holds=_holds,
    rule=OfRecords(format.format_of, decode.warps_of),
    packs=pack.HONOURS,
    task=decode.segment_task,
    layout=pack.ClassLayout(),
)
