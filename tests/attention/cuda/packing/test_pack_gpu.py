"""The packing kernels on a real GPU against torch, byte for byte; classes by kernels' levels."""

import pytest
import torch
from class_pack_cases import (
    CLASS_CASES,
    ClassCase,
    assert_same_records,
    class_states,
    packed_by_torch,
    run_classes,
)
from cuda_device import NEEDS_KERNELS
from same_tokens import assert_same_tokens

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes.stream import ClassLayout
from duotone.attention.cuda.groups.pack import NO_ROOM, SCALE_TOO_LARGE, group_pack
from duotone.attention.cuda.packing.inputs import TILE_TOKENS
from duotone.attention.cuda.shared.runtime import kernel
from duotone.attention.cuda.spans import held as span_held
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans.held import Held
from duotone.attention.cuda.spans.layout import span_layout
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.plan import Shape, resolve
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, LayerStore, Ledger
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Move
from duotone.quant import CacheSpec

from cases import CALIBRATED
from pack_cases import (
    APART_CASES,
    BF16,
    FP16,
    GROUP_CASES,
    LARGE_CASES,
    SEARCHED_CASES,
    SPAN_CASES,
    GroupCase,
    SpanCase,
    assert_same_pair,
    by_levels_of_kernels,
    kivi,
    run_groups,
    run_spans,
    taken_anywhere,
)

pytestmark = NEEDS_KERNELS


def compares(case: GroupCase) -> bool:
    """A hybrid that computes both mappings: near ties are decided by the order of a sum."""
    decides = case.specs.value.hybrid_at == "always" or not case.decoding
    return decides and "hybrid" in (case.specs.key.mapping, case.specs.value.mapping)


@pytest.mark.parametrize("case", GROUP_CASES + APART_CASES + LARGE_CASES, ids=str)
def test_groups(case) -> None:
    data, expected, overflow = run_groups(case)
    different = float((data != expected).float().mean())
    assert different < 1e-3 if compares(case) else different == 0
    assert not overflow


def launch(key, value, data, where=0, overflow=None, case=None) -> None:
    case = case or GroupCase(kivi(2), 128)
    index = torch.arange(64, device="cuda").expand(len(key), -1)
    tiles = torch.full((len(key),), 2, device="cuda")
    at = torch.full((len(key),), where, device="cuda")
    group_pack(key, value, index, tiles, at, case.form, case.specs, data, overflow=overflow)


def buffers(fill: float = 1.0):
    form = GroupCase(kivi(2), 128).form
    torch.manual_seed(0)
    key, value = (torch.randn(2, 2, 64, 128, device="cuda").to(BF16) * fill for _ in range(2))
    data = torch.zeros(2, 2, 2, form.nbytes, dtype=torch.uint8, device="cuda")
    return key, value, data, torch.zeros(1, dtype=torch.int32, device="cuda")


def test_scales_that_do_not_fit_are_told() -> None:
    key, value, data, overflow = buffers(fill=1e5)
    launch(key, value, data, overflow=overflow)
    assert int(overflow) == SCALE_TOO_LARGE
    launch(key, value, data)


def test_tiles_without_room_are_told_and_not_written() -> None:
    key, value, data, overflow = buffers()
    launch(key, value, data, where=1 << 20, overflow=overflow)
    assert int(overflow) == NO_ROOM
    assert not data.any()


def test_a_captured_launch_reads_what_is_there_at_replay() -> None:
    key, value, data, _ = buffers()
    launch(key, value, data)
    expected = data.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(key, value, data)
    data.zero_()
    graph.replay()
    assert torch.equal(data, expected)
    key.mul_(2)
    graph.replay()
    assert not torch.equal(data, expected)


@pytest.fixture
def sources(monkeypatch) -> list[str]:
    """The files of the kernels that pack spans, as they are launched."""
    launched: list[str] = []

    def noted(source, *rest):
        function = kernel(source, *rest)

        def launch(*given) -> None:
            launched.append(source)
            function(*given)

        launch.clusters_at_once = function.clusters_at_once
        return launch

    monkeypatch.setattr(span_pack, "kernel", noted)
    return launched


TWICE = [span_pack.SOURCE] * 2


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("cluster", [8, 7, 1, None], ids=["cluster", "odd", "block", "twice"])
@pytest.mark.parametrize("case", SPAN_CASES, ids=str)
def test_spans(case, cluster, sources, monkeypatch) -> None:
    tiles = -(-case.longest // TILE_TOKENS)
    at = cluster and Held(cluster, -(-tiles // cluster))
    monkeypatch.setattr(span_pack, "held", lambda *_: at)
    assert_same_pair(*run_spans(case))
    assert sources == (TWICE if at is None else [span_held.SOURCE])


@pytest.mark.parametrize("bits", [(1, 1), (2, 4), (3, 3), (8, 8)], ids=str)
@pytest.mark.parametrize(
    ("lengths", "once"), [((3328,), True), ((3900,), True), ((8192, 5000), False)], ids=str
)
def test_long_spans_are_held_or_split_and_merged(lengths, once, bits, sources) -> None:
    edges = tuple((0, n) for n in lengths)
    for seed in range(3):
        assert_same_pair(*run_spans(SpanCase(edges, bits, heads=4), seed))
        assert sources == ([span_held.SOURCE] if once else TWICE)
        sources.clear()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", SEARCHED_CASES, ids=str)
def test_spans_with_searched_levels(case, sources) -> None:
    for seed in range(2):
        assert_same_pair(*run_spans(case, seed))
    assert sources == [span_pack.SOURCE] * 2


def test_a_cache_searches_levels_without_torch(monkeypatch) -> None:
    case = SEARCHED_CASES[0]
    key, value = (torch.randn(2, 2, 500, 128, device="cuda", dtype=BF16) for _ in range(2))
    piece = taken_anywhere(torch.tensor(case.edges, device="cuda"), 500)
    expected = by_levels_of_kernels(key, value, case.spec, piece)
    for name in ("cache.pair.pack_tensor", "attention.cuda.classes.pack.torch_levels"):
        monkeypatch.delattr(f"duotone.{name}")
    assert_same_pair(SpanLayout().pack(key, value, case.spec, piece), expected)


def test_searched_levels_that_are_not_finite_raise_as_torch_does() -> None:
    case = SEARCHED_CASES[2]
    key, value = (torch.randn(2, 2, 500, 128, device="cuda", dtype=FP16) for _ in range(2))
    piece = taken_anywhere(torch.tensor(case.edges, device="cuda"), 500)
    key[0, 1, piece.take.index[0, 77], 3] = float("nan")
    with pytest.raises(ValueError, match="only finite values"):
        SpanLayout().pack(key, value, case.spec, piece)


def test_a_captured_span_is_packed_from_what_is_there_at_replay(sources) -> None:
    case = SpanCase()
    key, value = (torch.randn(1, 8, 3328, 128, device="cuda", dtype=BF16) for _ in range(2))
    index = torch.arange(3328, device="cuda")[None]
    spans = BlockTable(torch.tensor([[0, 3328]], device="cuda"))
    piece = Piece(Move(index, spans.lengths), spans, Move(index, spans.lengths))

    def pack() -> PackedPair:
        return span_pack.span_pack(key, value, case.spec, piece)

    pack()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pack()
    key.copy_(torch.randn_like(key))
    graph.replay()
    assert_same_pair(captured, PackedPair.pack(key, value, case.spec, piece).laid_out(span_layout))
    assert set(sources) == {span_held.SOURCE}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CLASS_CASES, ids=str)
def test_classes(case) -> None:
    assert_same_records(*run_classes(case))


def test_long_spans_of_classes() -> None:
    case = ClassCase("long", *CALIBRATED, ((0, 8192), (0, 5000)), heads=8)
    for seed in range(3):
        assert_same_records(*run_classes(case, seed))


@pytest.mark.parametrize("case", [CLASS_CASES[0], CLASS_CASES[1], CLASS_CASES[6]], ids=str)
def test_a_cache_lays_classes_out_without_torch(case, monkeypatch) -> None:
    key, value, piece = class_states(case)
    expected = packed_by_torch(key, value, case.spec, piece)
    # Neither canonical codes nor their conversion.
    for name in ("pack_tensor", "to_class_records"):
        for module in ("cache.pair", "attention.cuda.classes.layout"):
            monkeypatch.delattr(f"duotone.{module}.{name}", raising=False)
    pair = ClassLayout().pack(key, value, case.spec, piece)
    assert_same_records(pair, expected)


def test_classes_that_are_not_finite_raise_as_torch_does() -> None:
    case = CLASS_CASES[0]
    key, value, piece = class_states(case)
    value[0, 1, piece.take.index[0, 77], 3] = float("nan")
    with pytest.raises(ValueError, match="only finite values"):
        ClassLayout().pack(key, value, case.spec, piece)


def test_a_number_that_is_not_finite_is_left_to_torch() -> None:
    case = SpanCase()
    x = torch.randn(1, 2, 300, 128, device="cuda", dtype=BF16)
    offsets = torch.tensor([[0, 300]], device="cuda")
    index, spans = torch.arange(300, device="cuda")[None], BlockTable(offsets)
    piece = Piece(Move(index, spans.lengths), spans, Move(index, spans.lengths))
    assert SpanLayout().pack(x, x, case.spec, piece) is not None
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[0, 1, 77, 3] = bad
        assert SpanLayout().pack(x, y, case.spec, piece) is None


def no_kernel(*_) -> None:
    raise RefusedError("torch finds them here")


@pytest.mark.parametrize(
    "visual",
    [SpanCase(bits=(2, 1)).spec, CLASS_CASES[0].spec, CLASS_CASES[1].spec],
    ids=["spans", "classes", "classes of groups"],
)
def test_a_cache_packs_its_first_spans_at_once(visual, monkeypatch) -> None:
    # Levels are torch's, so that bytes can be compared.
    monkeypatch.setattr(class_pack.search, "check", no_kernel)
    torch.manual_seed(0)
    spec, stores = CacheSpec(visual=visual), []
    key, value = (torch.randn(2, 2, 700, 128, device="cuda", dtype=BF16) for _ in range(2))
    is_visual = torch.rand(2, 700, device="cuda") < 0.8
    real = torch.ones_like(is_visual)
    for layouts in (resolve(spec, Shape(128, 4, 2, BF16)).layouts, None):
        ledger, store = Ledger(spec, 2, is_visual.device), LayerStore(spec, layouts)
        for _ in range(2):  # a second turn joins the first
            store.apply(ledger.plan(is_visual, real), key, value)
            stores.append(store.visual)
    first, both, plain, plain_both = stores
    assert first.records is not None
    assert both.records is not None
    for one, other in ((first, plain), (both, plain_both)):
        canonical = one.canonical()
        for name in ("key", "value"):
            assert_same_tokens(getattr(canonical, name), getattr(other, name))
