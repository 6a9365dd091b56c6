"""Slots of the tables that layers use in turn, without a GPU."""

import torch

from duotone.attention.cuda.classes import pack
from duotone.cache import BlockTable


def test_layers_find_the_slots_of_both_parts_of_spans() -> None:
    """Making slots waits for the device, so it happens once for a table and not in every layer."""
    front, back = (BlockTable(torch.tensor([[0, n]])) for n in (40, 120))
    latest = pack._Latest()
    made = [latest.of(front, 64), latest.of(back, 64), latest.of(back, 128)]
    assert len({id(slots) for slots in made}) == 3
    for _ in range(2):
        assert latest.of(front, 64) is made[0]
        assert (latest.of(back, 64), latest.of(back, 128)) == (made[1], made[2])
    for n in range(pack._Latest.MOST):
        latest.of(BlockTable(torch.tensor([[0, n + 1]])), 64)
    assert latest.of(front, 64) is not made[0]
