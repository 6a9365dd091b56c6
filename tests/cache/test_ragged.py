"""Moves of ragged rows: runs are looked at, everything else is gathered."""

import pytest
import torch
from no_questions import NoQuestions

from duotone.cache.ragged import Move


def test_consecutive_tokens_are_picked_without_a_copy() -> None:
    x = torch.randn(2, 3, 9, 4)
    run = torch.arange(2, 7).expand(2, -1)
    move = Move(run.clone(), torch.tensor([5, 5]))
    assert move.start == 2
    assert torch.equal(move.pick(x), move.apply(x))
    assert move.pick(x).data_ptr() == x[:, :, 2:].data_ptr()


def test_a_range_of_tokens_is_known_to_be_one() -> None:
    x = torch.randn(2, 3, 9, 4)
    move = Move.consecutive(2, 5, torch.tensor([5, 3]))
    with NoQuestions():
        picked = move.pick(x)
    assert torch.equal(picked, move.apply(x))
    assert torch.equal(picked, x[:, :, 2:7])
    assert picked.data_ptr() == x[:, :, 2:].data_ptr()


@pytest.mark.parametrize("index", [[[0, 1, 3], [0, 1, 3]], [[0, 1, 2], [1, 2, 3]], [[2, 1, 0]] * 2])
def test_other_tokens_are_gathered(index: list) -> None:
    x, move = torch.randn(2, 3, 9, 4), Move(torch.tensor(index), torch.tensor([3, 3]))
    assert move.start is None
    assert torch.equal(move.pick(x), move.apply(x))


def test_no_tokens_are_no_run() -> None:
    move = Move(torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0]))
    assert move.pick(torch.randn(2, 3, 9, 4)).shape == (2, 3, 0, 4)


def test_groups_are_whole_where_all_sequences_have_whole_ones() -> None:
    move = Move(torch.zeros(2, 8, dtype=torch.long), torch.tensor([8, 4]))
    assert move.holds_groups_of(4)
    assert not move.holds_groups_of(8)
    assert move.holds_groups_of(4)
