"""The packing kernels compile for sm_90 without a GPU, and say what they cannot do."""

import re

import pytest
import torch
from class_pack_cases import CLASS_CASES, class_states
from level_cases import LEVEL_CASES, LONG_CASES

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes import stream as class_stream
from duotone.attention.cuda.classes import unpack as class_unpack
from duotone.attention.cuda.classes.format import Classes, ClassFormat
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.levels import gain as level_gain
from duotone.attention.cuda.levels import search as level_search
from duotone.attention.cuda.levels.search import Strip
from duotone.attention.cuda.packing.inputs import check_readable
from duotone.attention.cuda.shared.geometry import shared_bytes
from duotone.attention.cuda.spans import held as span_held
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans import unpack as span_unpack
from duotone.attention.cuda.spans.held import Held, held
from duotone.attention.cuda.spans.layout import RecordFormat, span_layout
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.plan import Shape, resolve
from duotone.attention.refused import RefusedError
from duotone.cache import LayerStore, Ledger
from duotone.cache.pair import Layouts, PackedPair
from duotone.quant import CacheSpec, KVSpec, TensorSpec

from compile_cases import binary_of
from pack_cases import BF16, FP16, FP32, GroupCase, SpanCase, inner, kivi

GROUPS = [
    GroupCase(kivi(2), 128),
    GroupCase(inner(2, "hybrid"), 128, norm=FP16),
    GroupCase(inner(4, "hybrid"), 96, norm=FP16),
    GroupCase(KVSpec(TensorSpec(1, "tokens", 128), TensorSpec(4, "channels")), 64, dtype=FP16),
    GroupCase(KVSpec(TensorSpec(4, "tokens", 32), inner(1, "symmetric").value), 80, dtype=FP32),
    GroupCase(kivi(2), 128, apart=("key", "value")),
    GroupCase(KVSpec(kivi(2).key, kivi(1).value), 128, apart=("value",)),
]


needs_nvrtc = pytest.mark.usefixtures("binaries")


@needs_nvrtc
@pytest.mark.parametrize("align", [16, 4], ids=["aligned", "words"])
@pytest.mark.parametrize("case", GROUPS, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_group_pack_compiles(arch, case, align) -> None:
    norm = 0 if case.norm is None else 1 + group_pack.INPUTS[case.norm]
    macros = group_pack.macros_of(case.form, case.specs, case.dtype)
    macros |= {"ALIGN": align, "NORM": norm}
    binary_of(group_pack.SOURCE, arch, macros)


@needs_nvrtc
@pytest.mark.parametrize("align", [16, 4], ids=["aligned", "words"])
@pytest.mark.parametrize(
    "case",
    [
        SpanCase(),
        SpanCase(bits=(4, 8), head_dim=96, dtype=FP32),
        SpanCase(bits=(2, 1), dtype=FP16, head_dim=256),
        SpanCase(bits=(3, 3)),
    ],
    ids=str,
)
def test_span_pack_compiles(case, align) -> None:
    macros = span_pack.macros_of(case.form, case.dtype, align)
    binary_of(span_pack.SOURCE, "sm_90", macros)


@needs_nvrtc
@pytest.mark.parametrize("align", [16, 2], ids=["aligned", "halves"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CLASS_CASES[:5], ids=str)
def test_class_pack_compiles(case, arch, align) -> None:
    form = ClassFormat.of(case.key, case.value, case.head_dim)
    macros = class_pack.macros_of(form, case.dtype, align)
    binary_of(class_pack.SOURCE, arch, macros)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "form", [RecordFormat(128, 1, 4), RecordFormat(80, 3, 8, small=True)], ids=str
)
def test_span_unpack_compiles(form, dtype, arch) -> None:
    binary_of(span_unpack.SOURCE, arch, span_unpack.macros_of(form, dtype))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CLASS_CASES[::3], ids=str)
def test_class_unpack_compiles(case, arch) -> None:
    form = ClassFormat.of(case.key, case.value, case.head_dim)
    binary_of(class_unpack.SOURCE, arch, class_unpack.macros_of(form, case.dtype))


@needs_nvrtc
@pytest.mark.parametrize("align", [16, 2], ids=["aligned", "halves"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", [*LEVEL_CASES[3:5], LONG_CASES[0]], ids=str)
def test_levels_compile(case, arch, align) -> None:
    classes = Classes.of(case.spec, case.head_dim)
    align = max(align, case.dtype.itemsize)
    macros = level_search.macros_of(case.spec, classes, case.head_dim, case.dtype, align)
    strips = [Strip.of(longest, case.head_dim, case.dtype.itemsize) for longest in (64, 300, 8192)]
    sources = [("levels/sums.cu", {})]
    sources += [("levels/search.cu", level_search.search_macros(strip)) for strip in strips]
    if case.spec.gain == "fit":
        sources += [(level_gain.SHORT, {"ROOM": n}) for n in level_gain.SHORT_TOKENS]
        sources.append((level_gain.LONG, level_gain.long_macros(case.head_dim)))
    for source, more in sources:
        binary_of(source, arch, macros | more)


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "at"), [("sm_90", Held(8, 13)), ("sm_90", Held(7, 3)), ("sm_80", Held(1, 5))], ids=str
)
@pytest.mark.parametrize(
    "case", [SpanCase(), SpanCase(bits=(4, 8), head_dim=96, dtype=FP32)], ids=str
)
def test_packing_in_one_launch_compiles(case, arch, at) -> None:
    macros = span_pack.common_macros(case.form, case.dtype, 16)
    macros |= span_pack.once_macros(at, case.form)
    binary_of(span_held.SOURCE, arch, macros)


FORM = RecordFormat(128, 1, 1)


@pytest.mark.parametrize(
    ("longest", "rows", "max_cluster", "at"),
    [
        (3328, 16, 8, Held(8, 13)),
        (6144, 16, 8, Held(8, 24)),
        (6145, 16, 8, None),
        (3328, 32, 8, None),
        (700, 32, 8, Held(4, 6)),
        (60, 16, 8, Held(2, 1)),
        (300, 16, 1, Held(1, 10)),
        (64, 133, 8, None),
    ],
    ids=["one", "as long as fits", "longer", "two", "short", "a tile each", "no clusters", "many"],
)
def test_few_rows_are_held_by_clusters(longest, rows, max_cluster, at) -> None:
    assert hold(longest, rows, max_cluster, lambda at: rows) == at


@pytest.mark.parametrize(
    ("longest", "at"), [(3328, Held(7, 15)), (6144, None)], ids=["one", "longer"]
)
def test_clusters_are_narrower_where_not_all_of_them_would_run_at_once(longest, at) -> None:
    groups = (18, 18, 18, 18, 16, 16, 14, 14)  # multiprocessors that may hold a cluster together
    assert hold(longest, 16, 8, lambda at: sum(n // at.cluster for n in groups)) == at
    assert hold(longest, 16, 8, lambda at: 0) is None


def hold(longest, rows, max_cluster, at_once) -> Held | None:
    most = shared_bytes(torch.device("cpu"))
    return held(longest, rows, FORM, BF16, 132, most, max_cluster, at_once)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec(2, "tokens", 32, levels="lloyd"), "levels='lloyd'"),
        (TensorSpec(2, "tokens", 32, "symmetric", eta=0.1), "eta"),
        (TensorSpec(8, "tokens", 32), "[1, 2, 4] bits"),
        (TensorSpec(2, "tokens", 32, param_dtype="bfloat16"), "param_dtype"),
        (TensorSpec(2, "tokens"), "by 32, 64 or 128"),
        (TensorSpec(2, "span", 32), "one axis"),
    ],
    ids=str,
)
def test_what_groups_cannot_be_is_named(spec, reason) -> None:
    with pytest.raises(RefusedError, match=re.escape(reason)):
        group_pack.check(KVSpec(spec, kivi(2).value))
    with pytest.raises(RefusedError, match="value is"):
        group_pack.check(KVSpec(kivi(2).key, spec))
    group_pack.check(kivi(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(2, 1, 64, 64)}, "consecutive channels"),
        ({"key": torch.zeros(2, 1, 128, 64, dtype=BF16)[:, :, ::2].mT.contiguous().mT}, "consecut"),
        ({"index": torch.zeros(2, 40, dtype=torch.long)}, "multiple of 32"),
        ({"index": torch.zeros(1, 64, dtype=torch.long)}, "multiple of 32"),
        ({"records": 7}, "contiguous records of"),
        ({"specs": kivi(2, levels="lloyd")}, "lloyd"),
    ],
    ids=["types", "strides", "tokens", "batch", "records", "specs"],
)
def test_arguments_that_do_not_fit_are_refused(change, message) -> None:
    case = GroupCase(kivi(2), 64)
    form = case.form
    nbytes = form.nbytes - change.pop("records", 0)
    given = {
        "key": torch.zeros(2, 1, 64, 64, dtype=BF16),
        "value": torch.zeros(2, 1, 64, 64, dtype=BF16),
        "index": torch.zeros(2, 64, dtype=torch.long),
        "tiles": torch.zeros(2, dtype=torch.long),
        "where": torch.zeros(2, dtype=torch.long),
        "form": form,
        "specs": case.specs,
        "data": torch.zeros(2, 1, 3, nbytes, dtype=torch.uint8),
    } | change
    with pytest.raises(ValueError, match=message):
        group_pack.group_pack(**given)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(2, 1, 11, 512, dtype=torch.uint8),
        torch.zeros(2, 1, 12, 256, dtype=torch.uint8),
        torch.zeros(1, 1, 12, 512, dtype=torch.uint8),
        torch.zeros(2, 1, 24, 512, dtype=torch.uint8)[:, :, ::2],
    ],
    ids=["room", "bytes", "batch", "strides"],
)
def test_codes_that_do_not_fit_are_refused(codes) -> None:
    case = GroupCase(kivi(2), 64, apart=("key",))
    states = torch.zeros(2, 1, 64, 64, dtype=BF16)
    counts = torch.zeros(2, dtype=torch.long)
    data = torch.zeros(2, 1, 6, case.form.own_nbytes, dtype=torch.uint8)
    index = torch.zeros(2, 64, dtype=torch.long)
    given = (states, states, index, counts, counts, case.form, case.specs, data)
    with pytest.raises(ValueError, match="as long as data"):
        group_pack.group_pack(*given, codes=(codes, None))
    of_values = torch.zeros(2, 1, 12, 512, dtype=torch.uint8)
    with pytest.raises(ValueError, match="has them apart"):
        group_pack.group_pack(*given, codes=(None, of_values))


def test_rows_that_are_moved_lose_their_alignment() -> None:
    x = torch.zeros(1, 2, 3, 72, dtype=BF16)
    assert group_pack.alignment(x[..., :64]) == 16
    assert group_pack.alignment(x[..., 2:66]) == 4
    assert group_pack.alignment(x[..., 1:65]) == 2
    assert group_pack.alignment(x[..., :65]) == 2


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (TensorSpec(levels="lloyd"), TensorSpec(), "levels='lloyd', key"),
        (TensorSpec(group=128), TensorSpec(group=256), "share their groups"),
        (TensorSpec(along="channels"), TensorSpec(along="channels"), "choice of along"),
    ],
    ids=["levels", "groups", "axis"],
)
def test_what_spans_cannot_be_is_named(key, value, reason) -> None:
    spec = KVSpec(key, value)
    with pytest.raises(RefusedError, match=reason):
        span_pack.check(spec)
    x = torch.zeros(1, 1, 300, 64)
    with pytest.raises(ValueError, match="Use PackedPair"):
        span_pack.span_pack(x, x, spec, None)


def test_what_classes_cannot_be_is_named() -> None:
    x = torch.zeros(1, 1, 300, 64)
    short = CLASS_CASES[0].key.replace(group=32)
    for spec in (KVSpec(TensorSpec(), TensorSpec()), KVSpec(short, short)):
        with pytest.raises(ValueError, match=r"class records.*Use PackedPair"):
            class_pack.class_pack(x, x, spec, None)
    with pytest.raises(ValueError, match=r"consecutive channels.*Use PackedPair"):
        class_pack.class_pack(x, x.double(), CLASS_CASES[0].spec, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.zeros(1, 1, 9, 64), torch.zeros(1, 1, 9, 64, dtype=BF16)),
        (torch.zeros(1, 1, 9, 64), torch.zeros(1, 1, 9, 32)),
        (torch.zeros(1, 1, 9, 64, dtype=torch.float64),) * 2,
        (torch.zeros(1, 1, 9, 512),) * 2,
        (torch.zeros(1, 1, 64, 9).mT,) * 2,
    ],
    ids=["types", "shapes", "float64", "wide", "strides"],
)
def test_states_that_spans_cannot_be_read_from_are_named(key, value) -> None:
    with pytest.raises(RefusedError, match="consecutive channels"):
        check_readable(key, value)
    good = torch.zeros(1, 2, 9, 64, dtype=BF16)
    check_readable(good, good)


def test_bounds_are_split_where_the_device_would_be_idle() -> None:
    assert span_pack.splits_of(8192, 512, 132) == 8
    assert span_pack.splits_of(3328, 16, 132) == 26
    assert span_pack.splits_of(100, 16, 132) == 1


@pytest.mark.parametrize(
    ("spec", "packer"),
    [(SpanCase().spec, SpanLayout), (CLASS_CASES[0].spec, class_stream.ClassLayout)],
    ids=["one width", "classes"],
)
def test_visual_tokens_are_packed_by_what_their_widths_need(spec, packer) -> None:
    plan = resolve(CacheSpec(visual=spec), Shape(64, 4, 2, BF16))
    assert isinstance(plan.layouts.visual, packer)


def test_where_no_kernel_runs_classes_are_left_to_torch() -> None:
    key, value, piece = class_states(CLASS_CASES[0])
    layout, spec = class_stream.ClassLayout(), CLASS_CASES[0].spec
    assert layout.pack(key.cpu(), value.cpu(), spec, piece) is None


class CountedLayout:
    """Packs with torch what a kernel would."""

    def __init__(self, can: bool = True) -> None:
        self.can, self.calls = can, 0

    def __call__(self, key, value):
        return span_layout(key, value)

    def pack(self, key, value, spec, piece):
        self.calls += 1
        pair = PackedPair.pack(key, value, spec, piece).laid_out(span_layout)
        return pair if self.can else None


@pytest.mark.parametrize("can", [True, False], ids=["kernel", "none"])
def test_visual_tokens_of_every_turn_are_packed_by_their_layout(can) -> None:
    """Torch takes some 2,000 launches a tensor to search levels, in a later turn as well."""
    layout = CountedLayout(can)
    spec = CacheSpec(visual=SpanCase().spec)
    ledger, store = Ledger(spec, 1, torch.device("cpu")), LayerStore(spec, Layouts(layout))
    visual = torch.ones(1, 200, dtype=torch.bool)
    states = torch.randn(1, 1, 200, 64)
    for turn in range(2):
        store.apply(ledger.plan(visual, visual), states, states)
        assert store.visual.records is not None
        assert store.visual.key.tokens == 200 * (turn + 1)
    assert layout.calls == 2
