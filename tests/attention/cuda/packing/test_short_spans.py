"""Spans that fill no records, by the packing kernels' own source on a CPU, against torch."""

import pytest
import torch
from short_spans import EDGES, FILLED, KINDS, assert_same_canonical, packed_short

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.short import pack as short_pack
from duotone.attention.cuda.spans import pack as span_pack

from cuda_on_cpu import missing, run_on_cpu
from pack_cases import SpanCase, taken_anywhere

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch, folder):
    """A module of a layout, and a spec of it; its kernels run on the CPU."""
    for module in (class_pack, span_pack, short_pack):
        run_on_cpu(module, monkeypatch, folder)
    return KINDS[request.param]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_spans_that_fill_no_records_are_canonical(edges, kind) -> None:
    mine, theirs = packed_short(*kind, edges)
    assert_same_canonical(mine, theirs)
    mine.key.codes[0, 0, 0, 0] ^= 1
    with pytest.raises(AssertionError):
        assert_same_canonical(mine, theirs)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("edges", FILLED, ids=str)
def test_spans_that_fill_records_keep_these(edges, kind) -> None:
    mine, theirs = packed_short(*kind, edges)
    assert mine.records is not None
    assert_same_canonical(mine.canonical(), theirs)


def test_no_tokens_are_left_to_torch(kind) -> None:
    assert packed_short(*kind, ((0, 0), (0, 0))) == (None, None)


def test_plain_short_spans_are_left_to_torch() -> None:
    """Min/max takes torch a few launches."""
    stored, _ = KINDS["searched"]
    x = torch.randn(1, 2, 110, 128)
    piece = taken_anywhere(torch.tensor(EDGES[2]), 110)
    assert stored.stored(x, x, SpanCase().spec, piece) is None
