"""The CUDA sources compile for sm_80 and sm_90 without a GPU, where NVRTC is installed."""

import ctypes
from dataclasses import replace

import pytest
import torch

from cubins import shared_of, stack_of
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.dense import window_append
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.format import APART_TILES, GroupFormat, Operand
from duotone.attention.cuda.rotate import merge as merge_turned
from duotone.attention.cuda.rotate import queries as head_turn
from duotone.attention.cuda.shared import launch, runtime
from duotone.attention.cuda.shared.geometry import SHARED_KIB, cut, ring_bytes
from duotone.attention.cuda.shared.work import QUERY_TYPES, Call
from duotone.attention.cuda.spans import calibrated as span_calibrated
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat

from compile_cases import RINGS, common

pytest.importorskip("cuda.core", reason="compiling CUDA sources needs cuda-core and NVRTC")

SPANS = [
    (RecordFormat(128, 1, 1), 4, False),
    (RecordFormat(128, 1, 1), 7, True),
    (RecordFormat(80, 4, 2), 16, True),
    (RecordFormat(32, 4, 4), 4, False),
]
PLAIN, INNER, SIGNED = (
    Operand(2, False, 32, False),
    Operand(1, True, 64, False),
    Operand(2, True, 32, True),
)
GROUPS = [
    (GroupFormat(128, PLAIN, PLAIN), 4),
    (GroupFormat(64, INNER, PLAIN), 16),
    (GroupFormat(256, SIGNED, SIGNED), 6),
    (GroupFormat(128, replace(PLAIN, bits=1), replace(PLAIN, bits=1)), 16),  # sums beyond records
    (GroupFormat(96, Operand(1, True, 32, True), Operand(4, True, 32, True)), 7),
]

PLAIN_APART, INNER_APART = (replace(x, apart=True) for x in (PLAIN, INNER))
APART = [
    (GroupFormat(128, PLAIN_APART, PLAIN_APART), 4),
    (GroupFormat(128, PLAIN, replace(PLAIN_APART, bits=1)), 1),
    (GroupFormat(64, INNER_APART, PLAIN), 16),
    (GroupFormat(96, PLAIN_APART, SIGNED), 7),
]

DENSE = [
    (128, 4, 1, torch.bfloat16),
    (80, 7, 0, torch.float16),
    (256, 16, 2, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.mark.parametrize(("form", "group", "tau"), SPANS, ids=str)
def test_span_decode_compiles_and_is_kept(form, group, tau, folder) -> None:
    assert span_decode.fits(form, group)
    warps = span_decode.warps_of(form, group)
    macros = common(form, group, warps, span_decode.Arguments) | span_decode.macros_of(form, tau)
    binary = runtime.compiled(span_decode.SOURCE, "sm_90", macros)
    assert binary[:4] == b"\x7fELF"
    (kept,) = folder.iterdir()
    assert kept.read_bytes() == binary
    kept.write_bytes(b"kept")
    assert runtime.compiled(span_decode.SOURCE, "sm_90", macros) == b"kept"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("bits", [1, 2])
def test_span_decode_compiles_with_12_warps_for_two_tiles_of_heads(bits, arch) -> None:
    form, sms = RecordFormat(128, bits, bits), 132
    at = span_decode.geometry(form, 6, 8 * 315, 26 * bits, sms, RINGS["sm_80"])
    assert (at.warps * at.per_sm, at.splits) == (12, 1)
    macros = common(form, 6, at.warps, span_decode.Arguments) | span_decode.macros_of(form, False)
    # With tickets, which few heads take, one word waits on the stack behind the loop.
    macros |= {"PER_SM": at.per_sm, "UNDER_WAY": bits, "MERGE": 2}
    binary = runtime.compiled(span_decode.SOURCE, arch, macros)
    assert stack_of(binary) == 0


@pytest.mark.parametrize(("arch", "teams"), [("sm_80", 2), ("sm_90", 2), ("sm_90", 4)])
@pytest.mark.parametrize("bits", [1, 2])
def test_span_decode_compiles_with_teams(bits, teams, arch) -> None:
    form = RecordFormat(128, bits, bits)
    macros = common(form, 4, 16 // teams, span_decode.Arguments)
    macros |= span_decode.macros_of(form, False) | {"TEAMS": teams, "PER_SM": 1, "UNDER_WAY": bits}
    binary = runtime.compiled(span_decode.SOURCE, arch, macros)
    assert stack_of(binary) == 0
    rings = 16 * form.stages * form.nbytes
    assert shared_of(binary, "span_decode") + rings <= SHARED_KIB[9, 0] << 10


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("under_way", [1, 2])
def test_span_decode_compiles_with_every_ring(under_way, arch) -> None:
    form = RecordFormat(128, 1, 1)
    macros = common(form, 4, 8, span_decode.Arguments) | span_decode.macros_of(form, False)
    macros["UNDER_WAY"] = under_way
    assert runtime.compiled(span_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("arch", "cluster"), [("sm_80", 1), ("sm_90", 4)])
@pytest.mark.parametrize(
    ("form", "group", "warps"),
    [
        (RecordFormat(128, 1, 1), 4, 16),
        (RecordFormat(80, 4, 2), 16, 8),
        (RecordFormat(64, 8, 1), 7, 8),
    ],
)
def test_span_calibrated_compiles_and_takes_what_is_planned(
    form, group, warps, arch, cluster
) -> None:
    macros = common(form, group, warps, span_decode.Arguments)
    macros |= span_decode.macros_of(form, True) | ({"CLUSTER": cluster} if cluster > 1 else {})
    binary = runtime.compiled(span_calibrated.SOURCE, arch, macros)
    if arch == "sm_90":
        planned = span_calibrated.static_bytes(form, group, warps)
        assert shared_of(binary, "span_calibrated") == planned + span_calibrated.RESERVED_BYTES


@pytest.mark.parametrize("records_per_page", [0, 3], ids=["whole", "pages"])
@pytest.mark.parametrize(("form", "group"), GROUPS, ids=str)
def test_group_decode_compiles(form, group, records_per_page) -> None:
    assert group_decode.fits(form, group)
    warps = group_decode.warps_of(form, group)
    macros = common(form, group, warps, Call) | group_decode.macros_of(form, group)
    macros["PAGED"] = records_per_page
    assert runtime.compiled(group_decode.SOURCE, "sm_90", macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("arch", "merge"), [("sm_80", 3), ("sm_90", 2), ("sm_90", 3)])
@pytest.mark.parametrize(("form", "group"), [GROUPS[0], GROUPS[4]], ids=str)
def test_group_decode_compiles_with_a_warp_for_a_head(form, group, arch, merge) -> None:
    at = group_decode.geometry(form, group, 132 * 14, 12, 132, RINGS["sm_80"])
    assert at.warps == 1
    macros = common(form, group, at.warps, Call) | group_decode.macros_of(form, group)
    macros |= {"MERGE": merge, "OVERLAP": 2, "PER_SM": at.per_sm}
    assert runtime.compiled(group_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("form", "group"), APART, ids=str)
def test_group_decode_compiles_for_codes_apart(form, group, arch) -> None:
    assert group_decode.fits(form, group)
    warps = group_decode.warps_of(form, group, RINGS["sm_80"])
    macros = common(form, group, warps, group_decode.Arguments) | group_decode.macros_of(
        form, group
    )
    assert runtime.compiled(group_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"
    with pytest.raises(Exception, match="lie in one piece"):
        runtime.compiled(group_decode.SOURCE, arch, macros | {"PAGED": 3})
    macros["ARGUMENTS_BYTES"] = ctypes.sizeof(Call)
    with pytest.raises(Exception, match="structure differs"):
        runtime.compiled(group_decode.SOURCE, arch, macros)


def test_records_of_codes_apart_hold_the_rest() -> None:
    for form, _ in APART:
        codes = zip((form.key, form.value), form.part_bytes, strict=False)
        apart = sum(nbytes for operand, nbytes in codes if operand.apart)
        assert form.own_tile_bytes + apart == form.tile_bytes
        assert form.own_nbytes % 16 == 0
        assert not any(nbytes % 16 for nbytes in form.part_bytes)
    # Whole records of any format: also of the smallest.
    small = Operand(1, True, 32, False)
    assert GroupFormat(32, small, small).tiles <= APART_TILES


@pytest.mark.parametrize(
    ("arch", "overlap", "merge"), [("sm_80", 1, 3), ("sm_90", 1, 1), ("sm_90", 2, 3)]
)
@pytest.mark.parametrize(("head_dim", "group", "query", "kv"), DENSE)
def test_dense_decode_compiles(head_dim, group, query, kv, arch, overlap, merge) -> None:
    form = dense_decode.DenseFormat(head_dim)
    macros = common(form, group, dense_decode.WARPS, dense_decode.Arguments)
    macros |= dense_decode.macros_of(form, kv)
    macros |= {"QUERY": query, "OUT": query, "OVERLAP": overlap, "MERGE": merge}
    assert runtime.compiled(dense_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("group", [4, 6])
def test_dense_decode_of_many_heads_keeps_nothing_on_the_stack(group) -> None:
    form = dense_decode.DenseFormat(128)
    macros = common(form, group, dense_decode.MANY_WARPS, dense_decode.Arguments)
    macros |= dense_decode.macros_of(form, torch.bfloat16)
    macros |= {"PER_SM": dense_decode.MANY_PER_SM, "OVERLAP": 2, "MERGE": 3}
    assert not stack_of(runtime.compiled(dense_decode.SOURCE, "sm_90", macros))


@pytest.mark.parametrize("overlap", [0, 2], ids=["alone", "joined"])
@pytest.mark.parametrize(("head_dim", "group", "query", "out"), [(128, 4, 1, 1), (80, 7, 0, 2)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_merge_parts_compiles(arch, head_dim, group, query, out, overlap) -> None:
    macros = {
        "CHANNELS": head_dim,
        "G": group,
        "WARPS": launch.MERGE_WARPS,
        "QUERY": query,
        "OUT": out,
        "OVERLAP": overlap,
        "ARGUMENTS_BYTES": ctypes.sizeof(Call),
    }
    assert runtime.compiled(launch.MERGE_SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("sms", [132, 4], ids=["few rows", "many"])
@pytest.mark.parametrize("dtype", QUERY_TYPES, ids=str)
@pytest.mark.parametrize("head_dim", head_turn.DEPTHS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_turns_compile(arch, head_dim, dtype, sms) -> None:
    at = head_turn.tiles(head_dim, 2, 28, sms)
    common = {"CHANNELS": head_dim, "G": 7, "QUERY": QUERY_TYPES[dtype], **at.macros}
    for module, own in (
        (head_turn, {"OUT": 2, "OVERLAP": 1}),
        (merge_turned, {"OUT": QUERY_TYPES[dtype], "OVERLAP": 2}),
    ):
        size = ctypes.sizeof(module.Arguments)
        macros = common | own | {"ARGUMENTS_BYTES": size}
        assert runtime.compiled(module.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("merge", [0, 2, 3], ids=["one part", "launch", "task"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_units_that_take_no_tickets_compile(arch, merge) -> None:
    form, group = SPANS[0][:2]
    macros = common(form, group, 4, span_decode.Arguments) | span_decode.macros_of(form, False)
    macros |= {"MERGE": merge, "OVERLAP": 2}
    assert runtime.compiled(span_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_window_append_compiles(arch) -> None:
    macros = window_append.macros_of(80, torch.bfloat16)
    assert macros["OVERLAP"]
    macros["ARGUMENTS_BYTES"] = ctypes.sizeof(window_append.Arguments)
    assert runtime.compiled(window_append.SOURCE, arch, macros)[:4] == b"\x7fELF"


def test_span_decode_compiles_for_pages() -> None:
    form = RecordFormat(128, 2, 2)
    macros = common(form, 4, 16, span_decode.Arguments) | span_decode.macros_of(form, True)
    binary = runtime.compiled(span_decode.SOURCE, "sm_90", macros | {"PAGED": 8})
    assert binary[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", RINGS)
@pytest.mark.parametrize(("form", "group"), GROUPS[:2] + GROUPS[3:], ids=str)
def test_group_decode_compiles_without_bulk_copies(form, group, arch) -> None:
    assert group_decode.fits(form, group, RINGS[arch])
    warps = group_decode.warps_of(form, group, RINGS[arch])
    assert warps * form.stages * form.nbytes <= RINGS[arch]
    macros = common(form, group, warps, Call) | group_decode.macros_of(form, group)
    assert runtime.compiled(group_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", RINGS)
@pytest.mark.parametrize(("form", "group", "tau"), SPANS, ids=str)
def test_span_decode_compiles_without_bulk_copies(form, group, tau, arch) -> None:
    assert span_decode.fits(form, group, RINGS[arch])
    warps = span_decode.warps_of(form, group, RINGS[arch])
    macros = common(form, group, warps, span_decode.Arguments) | span_decode.macros_of(form, tau)
    assert runtime.compiled(span_decode.SOURCE, arch, macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("capability", "kib"), [((8, 0), 144), ((8, 9), 80), ((9, 0), 208)])
def test_rings_take_what_a_device_has(capability, kib, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ring_bytes(torch.device("cuda")) == kib << 10


def test_window_move_compiles() -> None:
    size = ctypes.sizeof(window_append.MoveArguments)
    macros = {"ROW_BYTES": 256, "ARGUMENTS_BYTES": size}
    assert runtime.compiled(window_append.MOVE_SOURCE, "sm_90", macros)[:4] == b"\x7fELF"


def test_a_structure_of_another_size_does_not_compile() -> None:
    form = RecordFormat(64, 1, 1)
    macros = common(form, 4, 16, Call) | span_decode.macros_of(form, False)
    with pytest.raises(Exception, match="structure differs"):
        runtime.compiled(span_decode.SOURCE, "sm_90", macros)


def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DUOTONE_CACHE", str(blocked))
    form = RecordFormat(64, 1, 1)
    macros = common(form, 4, 16, span_decode.Arguments) | span_decode.macros_of(form, False)
    assert runtime.compiled(span_decode.SOURCE, "sm_90", macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("heads", "records", "splits"),
    [(256, 64, 1), (8, 1024, 16), (64, 256, 2)],
    ids=["many heads", "one long sequence", "a few"],
)
def test_a_launch_is_cut_to_fill_the_device(heads, records, splits) -> None:
    at = cut(RecordFormat(128, 1, 1), 16, heads, records, 132)
    assert at.splits == splits
    assert heads * at.splits <= 132 * at.per_sm


def test_no_split_holds_more_tokens_than_sums_can() -> None:
    form = RecordFormat(128, 1, 1)
    at = cut(form, 16, 512, 1024, 132, max_unit_tokens=32768)
    assert at.splits * 32768 >= 1024 * form.tokens
