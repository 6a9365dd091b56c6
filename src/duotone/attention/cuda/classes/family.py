"""The family of classes: codes of channels of unequal bits."""

from __future__ import annotations

from duotone.attention.cuda.classes import decode, format, layout, pack, stream, unpack
from duotone.attention.cuda.shared.of_records import OfRecords
from duotone.attention.family import Family

CLASSES = Family(
    "cuda",
    "class records",
    kinds=("visual", "background", "text"),
    honours=format.HONOURS,
    takes=lambda tokens: bool(tokens.key.classes or tokens.value.classes),
    holds=lambda segment: isinstance(segment.records, layout.ClassRecords),
    rule=OfRecords(format.format_of, decode.warps_of),
    packs=pack.HONOURS,
    task=decode.class_task,
    layout=stream.ClassLayout(),
    unpack=unpack.class_unpack,
)
