"""Spans that fill no records: packed by kernels all the same, then in canonical order."""

from types import SimpleNamespace

import pytest
import torch

from duotone.attention.cuda.classes import stream
from duotone.attention.cuda.classes.layout import to_class_records
from duotone.attention.cuda.spans import searched, stored
from duotone.attention.cuda.spans.layout import fitted, format_of, to_records
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec

from cases import SMALL
from pack_cases import SEARCHED_CASES, dense_states, taken_anywhere

EDGES = [((0, 81, 162), (0, 30, 30)), ((0, 1),), ((0, 42, 70),)]
FILLED = [((0, 64, 128),), ((0, 100, 300),)]


def in_class_records(key, value, spec: KVSpec, piece: Piece) -> PackedPair:
    """Play `class_pack` by torch, whatever the lengths are."""
    pair = PackedPair.pack(key, value, spec, piece)
    records = to_class_records(pair.key, pair.value)
    return PackedPair(pair.key.without_parts(), pair.value.without_parts(), records)


def in_records(key, value, spec: KVSpec, piece: Piece) -> PackedPair:
    """Play `searched_pack` by torch."""
    pair = PackedPair.pack(key, value, spec, piece)
    form = fitted(format_of(spec.key, spec.value, (key.shape[3],) * 2), pair.key.blocks)
    records = to_records(pair.key.unpacked(), pair.value.unpacked(), pair.key.blocks, form)
    return PackedPair(*records.left(pair.key, pair.value), records)


def packed(layout, spec: KVSpec, edges) -> tuple[PackedPair | None, PackedPair | None]:
    """(what a layout makes of K and V that it takes for a GPU's, what torch makes of them)."""
    torch.manual_seed(0)
    offsets = torch.tensor(edges)
    shape = (len(edges), 2, int(offsets.max()) + 29, 64)
    states = [dense_states(shape, torch.float16, 0) for _ in range(2)]
    piece = taken_anywhere(offsets, shape[2])
    on_gpu = [SimpleNamespace(is_cuda=True, shape=shape, states=x) for x in states]
    torchs = PackedPair.pack(*states, spec, piece) if piece.spans.tokens else None
    return layout.pack(*on_gpu, spec, piece), torchs


@pytest.fixture(params=["classes", "searched"])
def kind(request, monkeypatch):
    """A layout without kernels, and a spec of it."""
    monkeypatch.setattr(stream, "reason_against", lambda *_: None)

    def played(by):
        return lambda key, value, *rest: by(key.states, value.states, *rest)

    monkeypatch.setattr(stream, "pack", played(in_class_records))
    plain = {stored.check: "searched levels"}
    monkeypatch.setattr(stored, "reason_against", lambda check, *_: plain.get(check))
    monkeypatch.setattr(searched, "searched_pack", played(in_records))
    if request.param == "classes":
        return stream.ClassLayout(), KVSpec(*SMALL)
    return stored.SpanLayout(), SEARCHED_CASES[0].spec


@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_spans_that_fill_no_records_are_canonical(edges, kind) -> None:
    mine, torchs = packed(*kind, edges)
    assert mine.records is None
    for one, other in ((mine.key, torchs.key), (mine.value, torchs.value)):
        assert (one.spec, one.dtype) == (other.spec, other.dtype)
        assert one.tensor_names() == other.tensor_names()
        for b, n in enumerate(other.blocks.lengths.tolist()):
            assert torch.equal(one.codes[b, :, :n], other.codes[b, :, :n])
            filled = other.blocks.sizes[b] > 0
            for part in {*other.tensor_names()} - {"codes"}:
                own, theirs = (getattr(x, part)[b][:, filled] for x in (one, other))
                assert torch.equal(own, theirs)


@pytest.mark.parametrize("edges", FILLED, ids=str)
def test_spans_that_fill_records_keep_these(edges, kind) -> None:
    mine, _ = packed(*kind, edges)
    assert mine.records is not None


def test_no_tokens_are_left_to_torch(kind) -> None:
    assert packed(*kind, ((0, 0), (0, 0))) == (None, None)
