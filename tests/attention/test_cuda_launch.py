"""What the CUDA kernels are told, read on a machine without a GPU: the launch itself is caught."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from duotone.attention.cuda import launch, span_decode
from duotone.attention.cuda.layout import span_layout
from duotone.cache.pair import PackedPair

from cases import Case, build

LENGTHS = (9000, 300)


@dataclass
class Caught:
    """One launch: the kernel's file, its macros, the grid and the structure of arguments."""

    source: str
    macros: dict
    at: launch.Launch
    given: launch.Call


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Caught]:
    launches: list[Caught] = []

    def kernel(source, name, macros, device):
        assert name == source.removesuffix(".cu")
        return lambda at, given: launches.append(Caught(source, dict(macros), at, given))

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "counters", lambda device, count: torch.zeros(count))
    monkeypatch.setattr(span_decode, "multiprocessors", lambda device: 132)
    return launches


def records_of(case: Case):
    """(query, segments), the packed one in records."""
    query, (first, *rest) = build(case)
    pair = PackedPair(first.key, first.value).laid_out(span_layout)
    return query, [replace(first, key=pair.key, value=pair.value, records=pair.records), *rest]


def span_of(segment) -> span_decode.Span:
    key, value = segment.key, segment.value
    params = (key.scale, key.zero_point, value.scale, value.zero_point)
    return span_decode.Span(segment.records, *params, key.blocks.offsets)


def test_a_launch_names_its_buffers_and_covers_the_work(caught) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    out, lse = (torch.empty(*query.shape[:2], 3, *tail) for tail in ((128,), ()))
    span_decode.span_decode(query, span_of(segment), 0.1, None, out, lse)
    (one,) = caught
    given, records = one.given, segment.records
    assert given.query == query.data_ptr()
    assert given.records == records.data.data_ptr()
    assert given.first_records == records.first.data_ptr()
    assert given.tokens == segment.key.blocks.offsets.data_ptr()
    assert (given.k_scale, given.v_scale) == (
        segment.key.scale.data_ptr(),
        segment.value.scale.data_ptr(),
    )
    assert (given.out, given.out_stride) == (out.data_ptr(), 3 * 128)
    assert (given.lse, given.lse_stride) == (lse.data_ptr(), 3)
    assert given.sm_scale == pytest.approx(0.1 * launch.LOG2E)
    assert (given.pages, one.macros["PAGED"]) == (None, 0)
    assert given.units == len(LENGTHS) * 2 * given.blocks * given.splits
    assert one.at.blocks * one.macros["TEAMS"] >= given.units
    assert one.at.shared_bytes == one.macros["WARPS"] * launch.STAGES * records.format.nbytes
    assert one.macros["G"] == query.shape[1] // 2


def test_a_launch_over_pages_covers_what_their_table_can_name(caught) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    data, per_page = segment.records.data, 4
    pool = torch.zeros(99, 2, per_page, data.shape[3], dtype=torch.uint8)
    pages = torch.arange(len(LENGTHS) * 20, dtype=torch.int32).view(len(LENGTHS), 20)
    span = span_of(segment)
    span = replace(span, records=replace(segment.records, data=pool))
    span_decode.span_decode(query, span, 0.1, None, torch.empty_like(query), pages=pages)
    (one,) = caught
    assert one.macros["PAGED"] == per_page
    assert (one.given.records, one.given.pages) == (pool.data_ptr(), pages.data_ptr())
    assert (one.given.pages_per_sequence, one.given.kv_heads) == (20, 2)
    assert one.given.units == len(LENGTHS) * 2 * one.given.blocks * one.given.splits
    with pytest.raises(ValueError, match="int32"):
        span_decode.span_decode(query, span, 0.1, None, query, pages=pages.long())


@pytest.mark.parametrize("tau", [None, (0.0, 3.0)], ids=["plain", "tau"])
def test_only_calibration_over_parts_needs_all_blocks_at_once(caught, tau) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    span_decode.span_decode(query, span_of(segment), 0.1, tau, torch.empty_like(query))
    (one,) = caught
    assert one.given.splits > 1
    assert one.at.cooperative == (tau is not None)
    assert one.given.lse is None


def test_a_dense_segment_beside_an_empty_span_is_not_taken_for_one(monkeypatch) -> None:
    pytest.importorskip("triton", reason="dense segments go through Triton")
    from duotone.attention.cuda import decode

    query, kv = records_of(Case((1, 1), head_dim=128, dense=(5, 9)))
    monkeypatch.setattr(type(kv[0]), "tokens", property(lambda span: 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    seen: list[list[type]] = []
    monkeypatch.setattr(
        decode, "attend_launches", lambda query, launches, *_: seen.append([*map(type, launches)])
    )
    decode.attend_records(query, kv, 0.1, None)
    assert seen == [[decode.SegmentLaunch]]
