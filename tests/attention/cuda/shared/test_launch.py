"""Arguments of the CUDA kernels, caught at the launch on a machine without a GPU."""

import ctypes
from dataclasses import replace

import pytest
import torch
from launch_cases import LENGTHS, attend_records, built, class_launch, records_of, span_launch
from run_cases import KEEPS, reader

import duotone
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.dense.family import DENSE
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.cuda.shared import launch
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.attention.cuda.shared.work import Call, inverse_of
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.family import Tokens
from duotone.cache.pair import PackedPair
from duotone.quant import TensorSpec

from cases import CALIBRATED, Case


def test_a_launch_names_its_buffers_and_covers_the_work(caught) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    out, lse = (torch.empty(*query.shape[:2], 3, *tail) for tail in ((128,), ()))
    launch.run([span_decode.span_task(query, segment, None)], 0.1, out, lse)
    (one,) = caught
    given, records = one.given, segment.records
    assert given.query == query.data_ptr()
    assert given.packed_tiles == records.data.data_ptr()
    assert given.first_packed_tiles == records.first.data_ptr()
    assert given.tokens == segment.key.blocks.offsets.data_ptr()
    assert (given.k_scale, given.v_scale) == (
        segment.key.scale.data_ptr(),
        segment.value.scale.data_ptr(),
    )
    assert (given.out, given.out_stride) == (out.data_ptr(), 3 * 128)
    assert (given.lse, given.lse_stride) == (lse.data_ptr(), 3)
    assert given.sm_scale == pytest.approx(0.1 * launch.LOG2E)
    assert (given.pages, one.macros["PAGED"]) == (None, 0)
    assert one.at.blocks == (given.blocks * given.splits, 2, len(LENGTHS))
    assert given.splits_inverse == inverse_of(given.splits)
    assert (
        one.at.shared_bytes == one.macros["WARPS"] * records.format.stages * records.format.nbytes
    )
    assert one.macros["G"] == query.shape[1] // 2


def test_a_launch_over_pages_covers_what_their_table_can_name(caught) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    data, per_page = segment.records.data, 4
    pool = torch.zeros(99, 2, per_page, data.shape[3], dtype=torch.uint8)
    pages = torch.arange(len(LENGTHS) * 20, dtype=torch.int32).view(len(LENGTHS), 20)
    span = replace(segment, records=replace(segment.records, data=pool))
    launch.run([span_decode.span_task(query, span, None, pages)], 0.1, torch.empty_like(query))
    (one,) = caught
    assert one.macros["PAGED"] == per_page
    assert (one.given.packed_tiles, one.given.pages) == (pool.data_ptr(), pages.data_ptr())
    assert (one.given.pages_per_sequence, one.given.kv_heads) == (20, 2)
    assert one.at.blocks == (one.given.blocks * one.given.splits, 2, len(LENGTHS))
    with pytest.raises(ValueError, match="int32"):
        span_decode.span_task(query, span, None, pages.long())


def test_channels_of_unequal_bits_bring_their_own_parameters(caught) -> None:
    visual = duotone.scheme("duotone-whole", bits=1).visual
    segment, one = class_launch(caught, visual.key, visual.value, kv_heads=2, spans=2)
    assert not segment.key.tensor_names()
    given, records, tokens = one.given, segment.records, segment.value.blocks.offsets
    assert (given.packed_tiles, given.tokens) == (records.data.data_ptr(), tokens.data_ptr())
    assert (given.k_top, given.v_scale, given.v_zero, given.v_order) == (
        records.key_top.data_ptr(),
        records.value_scale.data_ptr(),
        records.value_zero.data_ptr(),
        records.value_order.data_ptr(),
    )
    assert not any((given.k_scale, given.k_zero, given.k_order))
    assert (given.blocks, one.macros["K_TILES"]) == (2, 1)
    assert {name: one.macros[name] for name in ("KN4", "KN2", "KN1", "VN4", "VN2", "VN1")} == {
        "KN4": 16, "KN2": 32, "KN1": 0, "VN4": 0, "VN2": 16, "VN1": 96,
    }  # fmt: skip
    assert one.at.shared_bytes == one.macros["WARPS"] * 3 * 2448


def test_parameters_of_spans_are_named_for_k_as_for_v(caught) -> None:
    segment, one = class_launch(caught, *CALIBRATED, kv_heads=2, spans=2)
    assert not segment.key.tensor_names()
    records = segment.records
    assert not one.given.k_top
    for short, name in (("k", "key"), ("v", "value")):
        for part in ("scale", "zero", "order"):
            tensor = getattr(records, f"{name}_{part}")
            assert getattr(one.given, f"{short}_{part}") == tensor.data_ptr()
            assert tensor.is_contiguous()
    assert (one.given.blocks, one.macros["K_TILES"], one.macros["TILES"]) == (2, 0, 1)
    assert one.at.shared_bytes == one.macros["WARPS"] * 3 * records.format.nbytes


def test_sums_of_many_heads_find_room_beside_small_records(caught) -> None:
    specs = TensorSpec(classes=((4, 1 / 2),)), TensorSpec(classes=((1, 1 / 4),))
    segment, one = class_launch(caught, *specs, gqa=16)
    # Rows of 128 + 8 floats for 16 q heads, in three slots of whole lines.
    assert segment.records.format.nbytes == 2304
    assert one.macros["SLOT_BYTES"] == 2944
    assert one.at.shared_bytes == one.macros["WARPS"] * 3 * 2944


KIVI = {"key": TensorSpec(2, "tokens", 32), "value": TensorSpec(1, "channels", 32)}


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
def test_codes_apart_are_read_where_another_layer_keeps_them(parts, caught) -> None:
    query, (segment, *_) = built(Case(LENGTHS, **KIVI, head_dim=128, kv_heads=2))
    read = reader(segment, parts)
    attend_records(query, [read], sm_scale=0.1)
    (one,) = caught
    form, records = read.records.format, read.records
    assert one.given.packed_tiles == records.data.data_ptr()
    assert one.macros["ARGUMENTS_BYTES"] == ctypes.sizeof(group_decode.Arguments)
    for which, tiles in zip(("key", "value"), records.codes, strict=True):
        told = getattr(one.given, which)
        if which in parts:
            assert (told.data, told.head_bytes) == (tiles.data_ptr(), tiles[0, 0].nbytes)
        else:
            assert tiles is None
            assert told.data is None
    separate = [one.macros[f"{x}_SEPARATE"] for x in "KV"]
    assert separate == [int(x in parts) for x in ("key", "value")]
    # Rings hold all pieces of a record, and the work is cut as if it were whole.
    assert one.at.shared_bytes == one.macros["WARPS"] * form.stages * form.nbytes
    whole = PackedPair(segment.key, segment.value).laid_out(GroupLayout())
    attend_records(query, [replace(read, records=whole.records)], sm_scale=0.1)
    assert caught[1].at == one.at
    assert caught[1].macros["ARGUMENTS_BYTES"] == ctypes.sizeof(Call)


def test_codes_apart_that_are_missing_or_too_few_are_refused(caught) -> None:
    query, (segment, *_) = built(Case(LENGTHS, **KIVI, head_dim=128, kv_heads=2))
    read = reader(segment, ("key",))
    codes, pages = read.records.key_codes, torch.zeros(2, 3, dtype=torch.int32)
    whole = read.records.data.shape[2] * read.records.format.tiles

    def task(key_codes: torch.Tensor | None) -> None:
        records = replace(read.records, key_codes=key_codes)
        group_decode.group_task(query, replace(read, records=records))

    task(codes[:, :, :whole].contiguous())
    few, strided = codes[:, :, : whole - 1].contiguous(), codes[:, :, :whole]
    for wrong in (None, few, codes[:1], strided, codes.to("meta")):
        with pytest.raises(ValueError, match="key_codes must be contiguous"):
            task(wrong)
    with pytest.raises(ValueError, match="are separate"):
        group_decode.group_task(query, read, pages=pages)


@pytest.mark.parametrize("tau", [None, (0.0, 3.0)], ids=["plain", "tau"])
def test_only_calibration_over_parts_needs_a_cluster(caught, tau) -> None:
    *_, one = span_launch(caught, tau)
    assert one.given.splits > 1
    assert one.at.cluster == (1 if tau is None else one.given.splits)
    assert not one.at.cooperative


def test_more_parts_than_a_cluster_has_run_cooperatively(caught, monkeypatch) -> None:
    """Such parts are launched first and count themselves, also where a launch merges others."""
    monkeypatch.setattr(span_decode, "max_cluster", lambda device: 1)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    query, (span, dense) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2, dense=(9, 700)))
    attend_records(query.bfloat16(), [dense, span], sm_scale=0.1, tau=(0.0, 3.0))
    assert caught[0].given.splits > 1
    assert [(one.at.cooperative, one.at.cluster) for one in caught] == [(True, 1), (False, 1)]
    assert [one.macros["MERGE"] for one in caught] == [1, 1]


def test_segments_meet_in_one_workspace(caught) -> None:
    query, kv = records_of(Case(LENGTHS, head_dim=128, kv_heads=2, dense=(9, 700)))
    attend_records(query.bfloat16(), kv, sm_scale=0.1)
    span, dense = caught
    assert (span.source, dense.source) == ("spans/decode.cu", "dense/decode.cu")
    same = ("partial", "counters", "out", "lse", "all_parts", "sm_scale")
    assert all(getattr(span.given, name) == getattr(dense.given, name) for name in same)
    parts = [one.given.blocks * one.given.splits for one in caught]
    assert span.given.all_parts == sum(parts)
    assert [one.given.first_part for one in caught] == [0, parts[0]]
    assert [one.macros["OVERLAP"] for one in caught] == [1, 2]
    window = kv[1]
    assert (dense.given.key, dense.given.tokens) == (
        window.key.data_ptr(),
        window.lengths.data_ptr(),
    )
    assert dense.given.key_batch == 2 * window.key.stride(0)


def attend_joined(monkeypatch, sms_of_rule: int) -> torch.Tensor:
    """A span and a window of two sequences with two kv heads each; returns the output."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: sms_of_rule)
    query, kv = records_of(Case(LENGTHS, head_dim=128, kv_heads=2, dense=(9, 700)))
    return attend_records(query.bfloat16(), kv, sm_scale=0.1)


def test_many_heads_are_merged_by_a_launch_of_its_own(caught, monkeypatch) -> None:
    out = attend_joined(monkeypatch, sms_of_rule=2)
    *decodes, merge = caught
    assert [one.source for one in caught] == [
        "spans/decode.cu", "dense/decode.cu", "shared/merge_parts.cu",
    ]  # fmt: skip
    assert [one.macros.get("MERGE") for one in caught] == [2, 2, None]
    assert not any(one.given.counters for one in caught)
    same = ("partial", "weights", "out", "out_stride", "lse", "all_parts")
    for name in same:
        assert len({getattr(one.given, name) for one in caught}) == 1
    assert merge.given.units == 4
    rows = out.shape[0] * out.shape[1]
    assert merge.at.blocks * merge.macros["WARPS"] >= rows
    assert (merge.at.threads, merge.at.overlap) == (merge.macros["WARPS"] * 32, True)
    assert merge.macros["OVERLAP"] == 2
    for one in decodes:
        assert one.given.units == 4 * one.given.blocks * one.given.splits


def test_the_last_task_merges_where_it_has_one_part(caught, monkeypatch) -> None:
    monkeypatch.setattr(dense_decode, "geometry", lambda *a: Geometry(2, 6, 1))
    attend_joined(monkeypatch, sms_of_rule=2)
    span, dense = caught
    assert (span.source, dense.source) == ("spans/decode.cu", "dense/decode.cu")
    assert (span.macros["MERGE"], dense.macros["MERGE"]) == (2, 3)
    assert dense.given.first_part == dense.given.all_parts - 1 == span.given.splits
    assert (dense.macros["OVERLAP"], dense.at.blocks) == (2, (1, 2, 2))


def test_rows_that_cannot_be_read_four_at_a_time_are_refused(caught) -> None:
    query, (segment, *_) = records_of(Case(LENGTHS, head_dim=128, kv_heads=2))
    room = query.new_empty(query.numel() + 1)
    apart = room[1:].view(query.shape).copy_(query)
    for rows, out in ((apart, torch.empty_like(query)), (query, apart)):
        with pytest.raises(ValueError, match="must be aligned to 8 bytes"):
            launch.run([span_decode.span_task(rows, segment, None)], 0.1, out)
    assert not caught


def test_few_heads_take_tickets(caught, monkeypatch) -> None:
    attend_joined(monkeypatch, sms_of_rule=3)
    assert [one.macros["MERGE"] for one in caught] == [1, 1]
    assert all(one.given.counters for one in caught)


def test_one_part_is_the_output(caught, monkeypatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    *_, one = span_launch(caught, lengths=(300, 300))
    assert (one.given.all_parts, one.macros["MERGE"]) == (1, 0)


def test_a_dense_segment_beside_an_empty_span_is_not_taken_for_one(caught, monkeypatch) -> None:
    query, kv = records_of(Case((1, 1), head_dim=128, dense=(5, 9)))
    monkeypatch.setattr(type(kv[0]), "tokens", property(lambda span: 0))
    attend_records(query, kv, sm_scale=0.1)
    assert [one.source for one in caught] == ["dense/decode.cu"]


def test_windows_are_told_in_bytes(caught) -> None:
    case = Case(LENGTHS, head_dim=80, kv_heads=2, dense=(9, 700))
    query, kv = records_of(case)
    attend_records(query, kv, sm_scale=0.1)
    dense, window, form = caught[-1], kv[1], dense_decode.DenseFormat(80)
    assert (dense.macros["KV"], dense.macros["KEYS"]) == (1, form.tokens)
    assert dense.given.key_batch == 2 * window.key.stride(0)
    assert dense.given.value_head == 2 * window.value.stride(1)
    # Rows of an even number of 16 bytes have a gap between them.
    assert form.nbytes == 2 * form.tokens * (2 * 80 + 16)
    assert dense.at.shared_bytes == dense.macros["WARPS"] * form.stages * form.nbytes
    apart = window.key.new_zeros(window.key.numel() + 4)[4:].view(window.key.shape)
    refused = replace(window, key=apart)
    assert "aligned" in DENSE.refusal(Tokens.of(query, refused), query, refused)


@pytest.mark.parametrize("sub_blocks", [2, 4])
def test_a_block_of_sub_blocks_has_as_many_kv_heads(sub_blocks, caught, monkeypatch) -> None:
    monkeypatch.setattr(span_decode, "geometry", lambda *a: Geometry(4, 4, 3, sub_blocks))
    _, segment, one = span_launch(caught, kv_heads=8, lengths=(300, 90))
    form = segment.records.format
    assert one.at.blocks == (3, 8 // sub_blocks, 2)
    assert one.at.threads == sub_blocks * 4 * 32
    assert one.at.shared_bytes == sub_blocks * 4 * form.stages * form.nbytes
    assert (one.macros["SUB_BLOCKS"], one.macros["PER_SM"]) == (sub_blocks, 4 // sub_blocks)
