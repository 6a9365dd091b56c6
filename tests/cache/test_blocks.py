import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.cache import blocks
from duotone.cache.blocks import BlockTable, runs, single_block
from duotone.cache.ragged import concatenate, select, valid_mask

MASKS = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3).map(
    torch.tensor
)
GROUPS = st.sampled_from([None, 1, 2, 3, 5, 32])


def spans_of(row: list[bool]) -> list[int]:
    """Lengths of the runs of True."""
    text = "".join("x" if bit else " " for bit in row)
    return [len(run) for run in text.split()]


@given(MASKS)
def test_runs_are_the_contiguous_pieces(mask: Tensor) -> None:
    table = runs(mask, mask.sum(-1))
    for sizes, row in zip(table.sizes.tolist(), mask.tolist(), strict=True):
        expected = spans_of(row)
        assert sizes[: len(expected)] == expected
        assert not any(sizes[len(expected) :])


@given(MASKS, st.integers(0, 99))
def test_runs_stay_whole_where_some_of_their_tokens_go(mask: Tensor, seed: int) -> None:
    kept = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
    table = runs(kept, kept.sum(-1), mask)
    for sizes, row, stays in zip(table.sizes.tolist(), mask.tolist(), kept.tolist(), strict=True):
        expected, start = [], 0
        for run in "".join("x" if bit else " " for bit in row).split(" "):
            expected.append(sum(stays[start : start + len(run)]))
            start += len(run) + 1
        expected = [count for count in expected if count]
        assert sizes[: len(expected)] == expected
        assert not any(sizes[len(expected) :])


@given(MASKS, GROUPS)
def test_split_cuts_every_span_and_keeps_blocks_first(mask: Tensor, group: int | None) -> None:
    table = runs(mask, mask.sum(-1)).split(group)
    for sizes, row in zip(table.sizes.tolist(), mask.tolist(), strict=True):
        expected = []
        for n in spans_of(row):
            step = group or n
            expected += [min(step, n - start) for start in range(0, n, step)]
        assert sizes[: len(expected)] == expected
        assert not any(sizes[len(expected) :])


@given(MASKS, MASKS, GROUPS)
def test_append_joins_tokens_and_parameters(first: Tensor, second: Tensor, group: int) -> None:
    second = second[:1].expand(len(first), -1)
    tables = [runs(m, m.sum(-1)).split(group) for m in (first, second)]
    joined, move = tables[0].append(tables[1])
    rows = torch.cat(
        [torch.arange(t.blocks).expand(len(first), -1) + 100 * i for i, t in enumerate(tables)], 1
    )
    if not rows.shape[1]:
        assert joined.blocks == 0
        return
    picked = move.apply_flat(rows)
    for b in range(len(first)):
        sizes = [t.sizes[b][: int(t.counts[b])].tolist() for t in tables]
        names = [list(range(100 * i, 100 * i + len(s))) for i, s in enumerate(sizes)]
        count = int(joined.counts[b])
        assert joined.sizes[b][:count].tolist() == sizes[0] + sizes[1]
        assert picked[b][:count].tolist() == names[0] + names[1]


@given(MASKS, GROUPS)
def test_slots_and_tokens_are_inverse(mask: Tensor, group: int | None) -> None:
    lengths = mask.sum(-1)
    table = runs(mask, lengths).split(group)
    n = int(lengths.max())
    if not n:
        return
    x = torch.arange(len(mask) * n).float().view(len(mask), 1, n, 1)
    back = table.to_tokens(table.to_slots(x))
    valid = valid_mask(lengths, n)[:, None, :, None]
    assert torch.equal(back.masked_fill(~valid, 0), x.masked_fill(~valid, 0))
    if table.blocks > 1:
        assert (table.mask.sum((1, 2)) == lengths).all()


def test_results_are_shared_between_layers() -> None:
    table, new = single_block(torch.tensor([7, 3])), single_block(torch.tensor([2, 2]))
    assert table.split(4) is table.split(4)
    assert table.append(new)[0] is table.append(new)[0]
    other = single_block(torch.tensor([2, 2]))
    assert table.append(other)[0] is table.append(other)[0]


def test_an_empty_table_has_no_blocks() -> None:
    table = BlockTable(torch.zeros(2, 1, dtype=torch.long))
    assert (table.blocks, table.longest, table.lengths.tolist()) == (0, 0, [0, 0])


@given(MASKS)
def test_select_compacts_in_order(mask: Tensor) -> None:
    move = select(mask)
    for b, row in enumerate(mask.tolist()):
        expected = [i for i, wanted in enumerate(row) if wanted]
        assert move.index[b][: int(move.lengths[b])].tolist() == expected


@given(MASKS, MASKS, st.integers(0, 3))
def test_concatenate_joins_ragged_rows(first: Tensor, second: Tensor, spare: int) -> None:
    second = second[:1].expand(len(first), -1)
    moves = [select(first), select(second)]
    rows = [m.index + 1 + 100 * i for i, m in enumerate(moves)]
    join = concatenate(moves[0].lengths, moves[1].lengths, moves[0].tokens, spare)
    joined = join.apply_flat(torch.cat(rows, 1))
    for b in range(len(first)):
        expected = [r[b][: int(m.lengths[b])].tolist() for r, m in zip(rows, moves, strict=True)]
        assert joined[b][: int(join.lengths[b])].tolist() == expected[0] + expected[1]
    assert join.tokens == int(join.lengths.max()) + spare


def test_nothing_is_remembered_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a capture that breaks off are never written."""
    table = BlockTable(torch.tensor([[0, 5, 7]]))
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "is_capturing", lambda device: True)
        made = [table.sizes, table.counts, table.split(2).offsets]
    for x in made:
        x.fill_(-1)
    assert (table.sizes.tolist(), table.counts.tolist()) == ([[5, 2]], [2])
    assert table.split(2).offsets.tolist() == [[0, 2, 4, 5, 7]]
    kept = table.sizes, table.split(2)
    assert kept[0] is table.sizes
    assert kept[1] is table.split(2)
