"""The packing kernels' own source, run on a CPU against torch, byte for byte."""

import pytest
import torch
from class_pack_cases import CLASS_CASES, assert_same_records, class_states, run_classes
from run_cases import KEEPS

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.classes.levels import torch_levels
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.attention.cuda.packing.inputs import TILE_TOKENS
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans.held import Held
from duotone.cache import BlockTable
from duotone.cache.ledger import Piece
from duotone.cache.packing import pack_tensor
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Move

from cases import states
from cuda_on_cpu import missing, run_on_cpu
from pack_cases import (
    APART_CASES,
    BF16,
    GROUP_CASES,
    LARGE_CASES,
    SEARCHED_CASES,
    SPAN_CASES,
    assert_same_pair,
    kivi,
    run_groups,
    run_spans,
)

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("case", GROUP_CASES + APART_CASES + LARGE_CASES, ids=str)
def test_groups(case, monkeypatch, folder) -> None:
    run_on_cpu(group_pack, monkeypatch, folder)
    data, expected, overflow = run_groups(case)
    assert torch.equal(data, expected)
    assert not overflow


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("launches", ["once", "twice"])
@pytest.mark.parametrize("case", SPAN_CASES, ids=str)
def test_spans(case, launches, monkeypatch, folder) -> None:
    run_on_cpu(span_pack, monkeypatch, folder)
    # There is no cluster: a thread block holds all tiles.
    at = Held(1, -(-case.longest // TILE_TOKENS)) if launches == "once" else None
    monkeypatch.setattr(span_pack, "held", lambda *_: at)
    assert_same_pair(*run_spans(case))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", SEARCHED_CASES, ids=str)
def test_spans_with_searched_levels(case, monkeypatch, folder) -> None:
    run_on_cpu(span_pack, monkeypatch, folder)
    actual, expected = run_spans(case)
    assert_same_pair(actual, expected)
    actual.records.data[0, 0, 0, 7] ^= 1
    with pytest.raises(AssertionError):
        assert_same_pair(actual, expected)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CLASS_CASES, ids=str)
def test_classes(case, monkeypatch, folder) -> None:
    run_on_cpu(class_pack, monkeypatch, folder)
    assert_same_records(*run_classes(case))


def test_codes_by_given_levels_are_those_of_quantizing() -> None:
    for case in (CLASS_CASES[1], CLASS_CASES[8]):
        key, _, piece = class_states(case)
        x = piece.take.apply(key)
        channels = Classes.of(case.key, case.head_dim).channels
        levels = torch_levels(x, case.key, piece.spans.split(case.key.group), channels)
        ours, theirs = levels.packed(x, case.key), pack_tensor(x, case.key, piece.spans)
        for name in theirs.tensor_names():
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_wrong_level_is_noticed(monkeypatch, folder) -> None:
    run_on_cpu(class_pack, monkeypatch, folder)
    actual, expected = run_classes(CLASS_CASES[2])
    assert_same_records(actual, expected)
    actual.records.data[0, 1, 0, 7] ^= 1
    with pytest.raises(AssertionError, match="data"):
        assert_same_records(actual, expected)


def assert_same_tiles(ours: GroupRecords, theirs: GroupRecords, counts: tuple[int, ...]) -> None:
    """Every buffer's tiles of each sequence; what is behind them may be anything."""
    pairs = zip((ours.tiles, *ours.codes), (theirs.tiles, *theirs.codes), strict=True)
    for mine, other in pairs:
        assert (mine is None) == (other is None)
        for b, count in enumerate(counts if mine is not None else ()):
            assert torch.equal(mine[b, :, :count], other[b, :, :count])


@pytest.mark.parametrize("keeps", [True, False], ids=["keeper", "reader"])
@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
def test_streams_of_a_run_are_packed_and_grow_at_once(parts, keeps, monkeypatch, folder) -> None:
    run_on_cpu(group_pack, monkeypatch, folder)
    torch.manual_seed(0)
    spec, lengths = kivi(2), torch.tensor([160, 64])
    dense = tuple(states(2, 2, 160, 64).to(BF16) for _ in range(2))
    take = Move(torch.arange(160).expand(2, -1), lengths)
    piece = Piece(take, BlockTable(torch.tensor([[0, 160], [0, 64]])), take)
    leaving, full = Move(torch.arange(7, 39).expand(2, -1), take.lengths), torch.tensor([True] * 2)
    layout = GroupLayout().sharing(parts if keeps else (), () if keeps else parts)
    theirs = PackedPair.pack(*dense, spec, piece)
    theirs = (theirs if keeps else theirs.without_codes(parts)).laid_out(layout).records
    by_torch = theirs.widened(192)
    by_torch.write(dense, leaving, full, lengths, None, spec)
    monkeypatch.setattr(group_pack, "has_kernels", lambda device: True)
    ours = layout.pack(*dense, spec, piece).records
    by_kernel = ours.widened(192)
    by_kernel.write(dense, leaving, full, lengths, None, spec)
    assert [x is None for x in ours.codes] == [
        not keeps or which not in parts for which in ("key", "value")
    ]
    assert_same_tiles(ours, theirs, (5, 2))
    assert_same_tiles(by_kernel, by_torch, (6, 3))
    with pytest.raises(AssertionError):
        assert_same_tiles(by_kernel, theirs.widened(192), (6, 3))
