"""Spans that fill no records on a real GPU, and pictures of a second turn: kernels pack them."""

import pytest
import torch
from class_pack_cases import ClassCase, class_states
from cuda_device import NEEDS_KERNELS

import duotone
from duotone.attention.cuda.classes.pack import prepared
from duotone.attention.cuda.classes.stream import ClassLayout
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.plan import Shape, resolve
from duotone.cache import LayerStore, Ledger
from duotone.cache.pair import PackedPair

from cases import CALIBRATED, SMALL
from pack_cases import BF16, SEARCHED_CASES, SpanCase, sorted_levels, taken_anywhere

pytestmark = NEEDS_KERNELS

EDGES = [((0, 81, 162), (0, 30, 30)), ((0, 1),), ((0, 42, 70),)]


def assert_same_canonical(mine: PackedPair, theirs: PackedPair) -> None:
    assert mine.records is None
    for one, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
        assert one.tensor_names() == other.tensor_names()
        for b, n in enumerate(other.blocks.lengths.tolist()):
            assert torch.equal(one.codes[b, :, :n], other.codes[b, :, :n])
            filled = other.blocks.sizes[b] > 0
            for part in {*other.tensor_names()} - {"codes"}:
                own, their = (getattr(x, part)[b][:, filled] for x in (one, other))
                assert torch.equal(own, their)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("specs", [SMALL, CALIBRATED], ids=["small", "calibrated"])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_classes_are_packed_by_kernels(edges, specs) -> None:
    case = ClassCase("short", *specs, edges, 64)
    key, value, piece = class_states(case)
    work = prepared(key, value, case.spec, piece)
    expected = PackedPair(
        work.key_levels.packed(work.key, case.key), work.value_levels.packed(work.value, case.value)
    )
    assert_same_canonical(ClassLayout().pack(key, value, case.spec, piece), expected)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_searched_levels_are_of_kernels(edges) -> None:
    spec = SEARCHED_CASES[0].spec
    offsets = torch.tensor(edges, device="cuda")
    shape = (len(edges), 2, int(offsets.max()) + 29, 128)
    states = [torch.randn(*shape, device="cuda", dtype=BF16) for _ in range(2)]
    piece = taken_anywhere(offsets, shape[2])
    pair = []
    for x, of in zip(states, (spec.key, spec.value), strict=True):
        taken = piece.take.apply(x)
        pair.append(sorted_levels(taken, of, piece.spans, x.shape[3]).packed(taken, of))
    assert_same_canonical(SpanLayout().pack(*states, spec, piece), PackedPair(*pair))


def test_plain_short_spans_are_left_to_torch() -> None:
    """Min/max takes torch a few launches."""
    x = torch.randn(1, 2, 110, 128, device="cuda", dtype=BF16)
    piece = taken_anywhere(torch.tensor(EDGES[2], device="cuda"), 110)
    assert SpanLayout().pack(x, x, SpanCase().spec, piece) is None


@pytest.mark.parametrize("tokens", [81, 144, 256])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_no_turn_takes_torch(bits, tokens, monkeypatch) -> None:
    """Two turns with two pictures each; levels and codes are of kernels."""
    for name in ("cache.pair.pack_tensor", "attention.cuda.classes.pack.torch_levels"):
        monkeypatch.delattr(f"duotone.{name}")
    spec = duotone.scheme("duotone", bits=bits).at_layer(1)
    visual = torch.ones(2, 2 * tokens + 9, dtype=torch.bool, device="cuda")
    visual[:, :5] = visual[:, 5 + tokens : 9 + tokens] = False
    real = torch.ones_like(visual)
    states = [torch.randn(2, 2, visual.shape[1], 64, device="cuda", dtype=BF16) for _ in range(2)]
    ledger = Ledger(spec, 2, visual.device)
    store = LayerStore(spec, resolve(spec, Shape(64, 4, 2, BF16)).layouts)
    for turn in (1, 2):
        store.apply(ledger.plan(visual, real), *states)
        parts = [store.visual, store.background]
        assert sum(pair.value.blocks.tokens for pair in parts if pair) == turn * 2 * tokens
