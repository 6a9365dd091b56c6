"""The family of groups: streams whose scales belong to few tokens or channels."""

from __future__ import annotations

from duotone.attention.cuda.groups import decode, format, pack, unpack
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.attention.cuda.shared.of_records import OfRecords
from duotone.attention.family import Family

GROUPS = Family(
    "cuda",
    "group records",
    kinds=("text",),
    honours=format.HONOURS,
    takes=lambda tokens: not (tokens.key.classes or tokens.value.classes),
    holds=lambda segment: isinstance(segment.records, GroupRecords),
    rule=OfRecords(format.format_of, decode.warps_of, shares=True),
    packs=pack.HONOURS,
    task=decode.group_task,
    layout=GroupLayout(),
    unpack=unpack.stream_unpack,
    again=lambda segment: (None, {"tokens": segment.lengths.data_ptr()}),
)
