"""Results that layers share of the few tables of blocks that they use in turn."""

import pytest
import torch

from duotone.attention.cuda.shared import tables
from duotone.attention.cuda.shared.slots import record_slots, slots_of
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.attention.cuda.spans.pack import places
from duotone.cache import BlockTable


def table(tokens: int) -> BlockTable:
    return BlockTable(torch.tensor([[0, tokens]]))


@pytest.mark.parametrize("find", [slots_of, record_slots, places])
def test_layers_find_what_they_know_of_both_parts_of_spans(find) -> None:
    """To find it, the host waits for the device."""
    front, back = table(40), table(120)
    uses = [(front, 64), (back, 64), (back, 1024)]
    made = [find(*use) for use in uses]
    assert len({id(found) for found in made}) == 3
    for _ in range(2):
        assert all(find(*use) is found for use, found in zip(uses, made, strict=True))
    for _ in range(tables.MOST):
        find(table(40), 64)
    assert find(front, 64) is not made[0]


def test_threads_with_other_tables_get_their_own() -> None:
    ours, others = table(200), table(9000)

    @once_per_table
    def tokens_of(blocks: BlockTable) -> tuple[int]:
        if blocks is ours:  # the other thread's call, while this one finds
            tokens_of(others)
        return (blocks.tokens,)

    assert tokens_of(ours) == (200,)
    assert tokens_of(others) == (9000,)
    assert tokens_of(ours) == (200,)


def test_equal_tables_are_not_one() -> None:
    """To compare them, the host would wait."""
    one, other = table(40), table(40)
    assert record_slots(one, 64) is not record_slots(other, 64)
