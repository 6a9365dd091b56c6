"""Spans that fill no records: what kernels' layouts make of them, and what torch makes."""

from __future__ import annotations

from types import ModuleType

import torch
from same_tokens import assert_same_tokens

from duotone.attention.cuda.classes import stream
from duotone.attention.cuda.spans import stored
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec

from cases import CALIBRATED, SMALL, device
from pack_cases import SEARCHED_CASES, dense_states, taken_anywhere

# Offsets of each sequence's spans.
EDGES = [((0, 81, 162), (0, 30, 30)), ((0, 1),), ((0, 42, 70),)]
FILLED = [((0, 64, 128),), ((0, 100, 300),)]
# {name: (module whose `stored` packs, spec)}.
KINDS = {
    "small": (stream, KVSpec(*SMALL)),
    "calibrated": (stream, KVSpec(*CALIBRATED)),
    "searched": (stored, SEARCHED_CASES[0].spec),
}


def packed_short(module: ModuleType, spec: KVSpec, edges) -> tuple[PackedPair | None, ...]:
    """(pair of kernels, pair of torch); the latter None without tokens."""
    torch.manual_seed(0)
    offsets = torch.tensor(edges, device=device())
    shape = (len(edges), 2, int(offsets.max()) + 29, 64)
    states = [dense_states(shape, torch.float16, 0) for _ in range(2)]
    piece = taken_anywhere(offsets, shape[2])
    torchs = PackedPair.pack(*states, spec, piece) if piece.spans.tokens else None
    return module.stored(*states, spec, piece), torchs


def assert_same_canonical(mine: PackedPair, theirs: PackedPair) -> None:
    """Both in canonical order, equal in every byte that belongs to tokens."""
    assert mine.records is None
    for one, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
        assert (one.spec, one.dtype) == (other.spec, other.dtype)
        assert_same_tokens(one, other)
