"""Cases of decode attention whose packed segments are in calibrated bases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from duotone.attention.cuda.classes.stream import ClassLayout
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.bases import Bases

from cases import Case, build

LAYERS = 2


def some_bases(folder: Path, kv_heads: int, head_dim: int) -> str:
    """A file of bases that are no rotations, but not far from one."""
    torch.manual_seed(0)
    shape = (2, LAYERS, kv_heads, head_dim, head_dim)
    key, value = torch.eye(head_dim) + 0.2 * torch.randn(shape) / head_dim**0.5
    path = folder / f"{kv_heads}-{head_dim}.safetensors"
    Bases(key, value, {}).save(path)
    return str(path)


def in_bases(case: Case, file: str, layer: int = 0) -> Case:
    """A case with K and V in the bases of a layer."""
    turned = {
        name: getattr(case, name).replace(transform=f"klt:{file}#{layer}.{name}")
        for name in ("key", "value")
    }
    return replace(case, **turned)


def build_spans(cases: list[Case]) -> tuple[Tensor, list[Segment]]:
    """The query of the first case; packed segments of all, the 16-bit one of the first."""
    query, kv = build(cases[0])
    others = [build(replace(case, dense=None), seed)[1] for seed, case in enumerate(cases[1:], 1)]
    return query, [kv[0], *(segment for (segment,) in others), *kv[1:]]


def laid_out(kv: list[Segment]) -> list[Segment]:
    """Segments with their packed tokens in records."""
    return [_laid_out(s) if isinstance(s, PackedSegment) else s for s in kv]


def _laid_out(segment: PackedSegment) -> PackedSegment:
    unequal = segment.key.spec.classes or segment.value.spec.classes
    layout = ClassLayout() if unequal else span_layout
    pair = PackedPair(segment.key, segment.value).laid_out(layout)
    assert pair.records is not None
    return replace(segment, key=pair.key, value=pair.value, records=pair.records)
