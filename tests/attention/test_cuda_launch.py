"""What the CUDA kernels are told, read on a machine without a GPU: the launch itself is caught."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

import duotone
from duotone.attention.cuda import class_decode, launch, span_decode
from duotone.attention.cuda.class_layout import class_layout
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
    for module in (span_decode, class_decode):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    return launches


def records_of(case: Case, layout=span_layout):
    """(query, segments), the packed one in records."""
    query, (first, *rest) = build(case)
    pair = PackedPair(first.key, first.value).laid_out(layout)
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
    assert given.units == len(LENGTHS) * 2 * given.blocks * given.splits
    assert one.at.blocks * one.macros["TEAMS"] >= given.units
    assert one.at.shared_bytes == one.macros["WARPS"] * launch.STAGES * records.format.nbytes
    assert one.macros["G"] == query.shape[1] // 2


def test_channels_of_unequal_bits_bring_their_own_parameters(caught) -> None:
    visual = duotone.scheme("duotone", bits=1).visual
    case = Case(LENGTHS, visual.key, visual.value, head_dim=128, kv_heads=2, spans=2)
    query, (segment, *_) = records_of(case, class_layout)
    assert not segment.key.tensor_names()
    records = segment.records
    span = class_decode.ClassSpan(records, segment.value.blocks.offsets)
    class_decode.class_decode(query, span, 0.1, torch.empty_like(query))
    (one,) = caught
    given = one.given
    assert (given.records, given.tokens) == (records.data.data_ptr(), span.tokens.data_ptr())
    assert (given.k_top, given.v_scale, given.v_zero, given.v_order) == (
        records.key_top.data_ptr(),
        records.value_scale.data_ptr(),
        records.value_zero.data_ptr(),
        records.value_order.data_ptr(),
    )
    assert given.blocks == 2
    assert {name: one.macros[name] for name in ("KN4", "KN2", "KN1", "VN4", "VN2", "VN1")} == {
        "KN4": 16, "KN2": 32, "KN1": 0, "VN4": 0, "VN2": 16, "VN1": 96,
    }  # fmt: skip
    assert one.at.shared_bytes == 16 * launch.STAGES * 2448


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
