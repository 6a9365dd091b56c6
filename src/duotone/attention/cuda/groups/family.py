"""The family of groups: streams whose scales belong to few tokens or channels."""

from __future__ import annotations

from duotone.attention.cuda.groups import decode, format, pack
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.attention.cuda.shared.of_records import OfRecords
from duotone.attention.family import Family
from duotone.cache.segments import PackedSegment, Segment


def _holds(segment: Segment) -> bool:
    return isinstance(segment, PackedSegment) and isinstance(segment.records, GroupRecords)


GROUPS = Family(
    "cuda",
    "group records",
    kinds=("text",),
    honours=format.HONOURS,
    takes=lambda tokens: True,
    holds=_holds,
    rule=OfRecords(format.format_of, decode.warps_of, shares=True),
    packs=pack.HONOURS,
    task=decode.segment_task,
    layout=GroupLayout(),
)
