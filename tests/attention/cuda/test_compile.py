"""The CUDA sources compile for sm_80 and sm_90 without a GPU, where NVRTC is installed."""

import ctypes
from dataclasses import replace

import pytest
import torch

from cubins import shared_of, stack_of
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.dense import window_append
from duotone.attention.cuda.groups import append as group_append
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups import step_numbers, tail
from duotone.attention.cuda.groups import unpack as group_unpack
from duotone.attention.cuda.groups.format import APART_TILES, GroupFormat, Operand
from duotone.attention.cuda.rotate import merge as merge_rotated
from duotone.attention.cuda.rotate import queries as rotate_queries
from duotone.attention.cuda.shared import geometry, launch
from duotone.attention.cuda.shared.geometry import SHARED_KIB, cut, ring_bytes
from duotone.attention.cuda.shared.work import QUERY_TYPES, Call
from duotone.attention.cuda.spans import calibrated as span_calibrated
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat
from duotone.serve.pages import PageLayout
from duotone.tools.devices import Facts

from compile_cases import RINGS, binary_of, compiled

SPANS = [
    (RecordFormat(128, 1, 1), 4, False),
    (RecordFormat(128, 1, 1), 7, True),
    (RecordFormat(80, 4, 2), 16, True),
    (RecordFormat(32, 4, 4), 4, False),
    (RecordFormat(128, 3, 3), 4, False),
    (RecordFormat(128, 4, 4, small=True), 4, False),
    (RecordFormat(80, 2, 1, small=True), 7, True),
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

DENSE = [(128, 4, 1, torch.bfloat16), (80, 7, 0, torch.float16), (256, 16, 2, torch.bfloat16)]


ARCHES = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
needs_nvrtc = pytest.mark.usefixtures("binaries")


@pytest.mark.parametrize(("form", "group", "tau"), SPANS, ids=str)
def test_span_decode_compiles_and_is_kept(form, group, tau, binaries) -> None:
    asked = ("sm_90", span_decode, form, group, None, tau)
    binary = compiled(*asked)
    (kept,) = binaries.iterdir()
    assert kept.read_bytes() == binary
    kept.write_bytes(binary[:4] + b"kept")
    assert compiled(*asked) == binary[:4] + b"kept"


@needs_nvrtc
@ARCHES
@pytest.mark.parametrize("bits", [1, 2])
def test_span_decode_compiles_with_12_warps_for_two_tiles(bits, arch) -> None:
    form, sms = RecordFormat(128, bits, bits), 132
    at = span_decode.geometry(form, 6, 8 * 315, 26 * bits, sms, RINGS["sm_80"])
    assert (at.warps * at.per_sm, at.splits) == (12, 1)
    # With tickets, which few heads take, one word waits on the stack behind the loop.
    more = {"PER_SM": at.per_sm, "IN_FLIGHT": bits, "MERGE": 2}
    assert stack_of(compiled(arch, span_decode, form, 6, at.warps, False, **more)) == 0


@needs_nvrtc
@pytest.mark.parametrize(("arch", "sub_blocks"), [("sm_80", 2), ("sm_90", 2), ("sm_90", 4)])
@pytest.mark.parametrize("bits", [1, 2])
def test_span_decode_compiles_with_sub_blocks(bits, sub_blocks, arch) -> None:
    form, more = RecordFormat(128, bits, bits), {"SUB_BLOCKS": sub_blocks, "IN_FLIGHT": bits}
    binary = compiled(arch, span_decode, form, 4, 16 // sub_blocks, False, **more)
    assert stack_of(binary) == 0
    rings = 16 * form.stages * form.nbytes
    assert shared_of(binary, "span_decode") + rings <= SHARED_KIB[9, 0] << 10


@needs_nvrtc
@ARCHES
@pytest.mark.parametrize(
    ("warps", "more"),
    [
        (8, {"IN_FLIGHT": 1}),
        (8, {"IN_FLIGHT": 2}),
        *((4, {"MERGE": merge, "OVERLAP": 2}) for merge in (0, 2, 3)),
    ],
    ids=["a tile under way", "two", "one part", "merged by a launch", "by a task"],
)
def test_span_decode_compiles_in_every_kind(warps, more, arch) -> None:
    compiled(arch, span_decode, SPANS[0][0], 4, warps, False, **more)


@needs_nvrtc
@pytest.mark.parametrize(("arch", "cluster"), [("sm_80", 1), ("sm_90", 4)])
@pytest.mark.parametrize(
    ("form", "group", "warps"),
    [
        (RecordFormat(128, 1, 1), 4, 16),
        (RecordFormat(80, 4, 2), 16, 8),
        (RecordFormat(64, 8, 1), 7, 8),
        (RecordFormat(128, 3, 3), 4, 8),
        (RecordFormat(80, 2, 2, small=True), 7, 8),
    ],
)
def test_span_calibrated_compiles_and_takes_what_is_planned(
    form, group, warps, arch, cluster
) -> None:
    more = {"CLUSTER": cluster} if cluster > 1 else {}
    source = span_calibrated.SOURCE
    binary = compiled(arch, span_decode, form, group, warps, True, source, **more)
    if arch == "sm_90":
        planned = span_calibrated.static_bytes(form, group, warps)
        assert shared_of(binary, "span_calibrated") == planned + span_calibrated.RESERVED_BYTES


@needs_nvrtc
@ARCHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [form for form, _ in (*GROUPS, *APART)], ids=str)
def test_group_unpack_compiles(form, dtype, arch) -> None:
    binary = binary_of(group_unpack.SOURCE, arch, group_unpack.macros_of(form, dtype))
    assert stack_of(binary) == 0


@needs_nvrtc
@pytest.mark.parametrize("records_per_page", [0, 3], ids=["whole", "pages"])
@pytest.mark.parametrize(("form", "group"), GROUPS, ids=str)
def test_group_decode_compiles(form, group, records_per_page) -> None:
    compiled("sm_90", group_decode, form, group, PAGED=records_per_page)


@needs_nvrtc
@pytest.mark.parametrize(("arch", "bits", "head_dim"), [("sm_80", 2, 64), ("sm_90", 4, 256)])
def test_steps_of_pages_compile_and_keep_nothing_on_the_stack(arch, bits, head_dim) -> None:
    """Decode with a tail, and the launches that append to it and work out the numbers."""
    layout = PageLayout(bits, head_dim, torch.bfloat16)
    more = {"ARGUMENTS_BYTES": ctypes.sizeof(tail.Arguments), "PAGED": 1}
    more |= {"TAIL": tail.ROW_TYPES[layout.dtype], "TAIL_PAGES": layout.rings}
    assert stack_of(compiled(arch, group_decode, layout.form, 6, **more)) == 0
    macros = group_append.macros(layout.form, layout.spec, layout.dtype, layout.rings)
    assert stack_of(binary_of(group_append.SOURCE, arch, macros)) == 0
    macros = step_numbers.macros_of(layout.tokens, layout.rings)
    assert stack_of(binary_of(step_numbers.SOURCE, arch, macros)) == 0


@needs_nvrtc
@pytest.mark.parametrize(("arch", "merge"), [("sm_80", 3), ("sm_90", 2), ("sm_90", 3)])
@pytest.mark.parametrize(("form", "group"), [GROUPS[0], GROUPS[4]], ids=str)
def test_group_decode_compiles_with_a_warp_for_a_head(form, group, arch, merge) -> None:
    at = group_decode.geometry(form, group, 132 * 14, 12, 132, RINGS["sm_80"])
    assert at.warps == 1
    more = {"MERGE": merge, "OVERLAP": 2, "PER_SM": at.per_sm}
    compiled(arch, group_decode, form, group, at.warps, **more)


@needs_nvrtc
@ARCHES
@pytest.mark.parametrize(("form", "group"), APART, ids=str)
def test_group_decode_compiles_for_codes_apart(form, group, arch) -> None:
    warps = group_decode.warps_of(form, group, RINGS["sm_80"])
    compiled(arch, group_decode, form, group, warps)
    with pytest.raises(Exception, match="are in one piece"):
        compiled(arch, group_decode, form, group, warps, PAGED=3)
    with pytest.raises(Exception, match="structure differs"):
        compiled(arch, group_decode, form, group, warps, ARGUMENTS_BYTES=ctypes.sizeof(Call))


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


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "overlap", "merge"), [("sm_80", 1, 3), ("sm_90", 1, 1), ("sm_90", 2, 3)]
)
@pytest.mark.parametrize(("head_dim", "group", "query", "kv"), DENSE)
def test_dense_decode_compiles(head_dim, group, query, kv, arch, overlap, merge) -> None:
    form, warps = dense_decode.DenseFormat(head_dim), dense_decode.WARPS
    more = {"QUERY": query, "OUT": query, "OVERLAP": overlap, "MERGE": merge}
    compiled(arch, dense_decode, form, group, warps, kv, **more)


@needs_nvrtc
@pytest.mark.parametrize("group", [4, 6])
def test_dense_decode_of_many_heads_keeps_nothing_on_the_stack(group) -> None:
    form, warps = dense_decode.DenseFormat(128), dense_decode.MANY_WARPS
    more = {"PER_SM": dense_decode.MANY_PER_SM, "OVERLAP": 2, "MERGE": 3}
    assert not stack_of(compiled("sm_90", dense_decode, form, group, warps, torch.bfloat16, **more))


@needs_nvrtc
@pytest.mark.parametrize("overlap", [0, 2], ids=["alone", "joined"])
@pytest.mark.parametrize(("head_dim", "group", "query", "out"), [(128, 4, 1, 1), (80, 7, 0, 2)])
@ARCHES
def test_merge_parts_compiles(arch, head_dim, group, query, out, overlap) -> None:
    macros = {"CHANNELS": head_dim, "G": group, "WARPS": launch.MERGE_WARPS, "OVERLAP": overlap}
    macros |= {"QUERY": query, "OUT": out, "ARGUMENTS_BYTES": ctypes.sizeof(Call)}
    binary_of(launch.MERGE_SOURCE, arch, macros)


@needs_nvrtc
@pytest.mark.parametrize("sms", [132, 4], ids=["few rows", "many"])
@pytest.mark.parametrize("dtype", QUERY_TYPES, ids=str)
@pytest.mark.parametrize("head_dim", rotate_queries.DEPTHS)
@ARCHES
def test_turns_compile(arch, head_dim, dtype, sms) -> None:
    at = rotate_queries.tiles(head_dim, 2, 28, sms)
    common = {"CHANNELS": head_dim, "G": 7, "QUERY": QUERY_TYPES[dtype], **at.macros}
    for module, own in (
        (rotate_queries, {"OUT": 2, "OVERLAP": 1}),
        *((merge_rotated, {"OUT": QUERY_TYPES[dtype], "OVERLAP": 2, "BASES": n}) for n in (1, 2)),
    ):
        size = ctypes.sizeof(module.Arguments)
        binary_of(module.SOURCE, arch, common | own | {"ARGUMENTS_BYTES": size})


@needs_nvrtc
@ARCHES
def test_windows_compile(arch) -> None:
    macros = window_append.macros_of(80, torch.bfloat16)
    assert macros["OVERLAP"]
    macros["ARGUMENTS_BYTES"] = ctypes.sizeof(window_append.Arguments)
    binary_of(window_append.SOURCE, arch, macros)
    size = ctypes.sizeof(window_append.MoveArguments)
    binary_of(window_append.MOVE_SOURCE, arch, {"ROW_BYTES": 256, "ARGUMENTS_BYTES": size})


@needs_nvrtc
def test_span_decode_compiles_for_pages() -> None:
    compiled("sm_90", span_decode, RecordFormat(128, 2, 2), 4, 16, True, PAGED=8)


WITHOUT_BULK_COPIES = [
    *((group_decode, *at, None) for at in GROUPS[:2] + GROUPS[3:]),
    *((span_decode, *at) for at in SPANS),
]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize(("module", "form", "group", "tau"), WITHOUT_BULK_COPIES, ids=str)
def test_decodes_compile_without_bulk_copies(module, form, group, tau, arch) -> None:
    warps = module.warps_of(form, group, RINGS[arch])
    assert warps * form.stages * form.nbytes <= RINGS[arch]
    compiled(arch, module, form, group, own=tau)


@pytest.mark.parametrize(("capability", "kib"), [((8, 0), 144), ((8, 9), 80), ((9, 0), 208)])
def test_rings_take_what_a_device_has(capability, kib, monkeypatch) -> None:
    monkeypatch.setattr(geometry, "facts", lambda device: Facts(capability, 1))
    assert ring_bytes(torch.device("cuda")) == kib << 10


@needs_nvrtc
def test_a_structure_of_another_size_does_not_compile() -> None:
    size = ctypes.sizeof(Call)
    with pytest.raises(Exception, match="structure differs"):
        compiled("sm_90", span_decode, RecordFormat(64, 1, 1), 4, 16, False, ARGUMENTS_BYTES=size)


@needs_nvrtc
def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DUOTONE_CACHE", str(blocked))
    compiled("sm_90", span_decode, RecordFormat(64, 1, 1), 4, 16, False)


def test_no_split_holds_more_tokens_than_sums_can() -> None:
    form = RecordFormat(128, 1, 1)
    at = cut(form, 16, 512, 1024, 132, max_unit_tokens=32768)
    assert at.splits * 32768 >= 1024 * form.tokens
