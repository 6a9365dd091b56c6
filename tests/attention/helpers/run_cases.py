"""A stream as a layer of a run has it: its own scales, codes that another layer keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from duotone.attention.cuda.groups.records import GroupLayout
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment

from cases import POISON_BYTE

KEEPS = {"k": ("key",), "v": ("value",), "both": ("key", "value")}


def of_run(pair: PackedPair, parts: tuple[str, ...]) -> tuple[PackedPair, PackedPair]:
    """(the layer that keeps the codes of `parts`, one that reads them), laid out."""
    keeps = pair.laid_out(GroupLayout().sharing(parts, ()))
    reads = pair.without_codes(parts).laid_out(GroupLayout().sharing((), parts))
    return keeps, reads


def completed(reads: PackedPair, keeps: PackedPair, parts: tuple[str, ...]) -> PackedPair:
    for which in parts:
        reads = reads.with_codes(which, keeps)
    return reads


def reader(segment: PackedSegment, parts: tuple[str, ...]) -> PackedSegment:
    """The segment in records, the codes of `parts` in another layer's longer, poisoned buffers."""
    keeps, reads = of_run(PackedPair(segment.key, segment.value), parts)
    for more, which in enumerate(parts, 3):  # each with a length of its own
        name = f"{which}_codes"
        codes = getattr(keeps.records, name)
        room = torch.full_like(codes[:, :, :1].expand(-1, -1, more, -1), POISON_BYTE)
        longer = replace(keeps.records, **{name: torch.cat([codes, room], 2)})
        keeps = replace(keeps, records=longer)
    pair = completed(reads, keeps, parts)
    return replace(segment, key=pair.key, value=pair.value, records=pair.records)
