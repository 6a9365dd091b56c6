"""Slots of class records as kernels want them: tokens, and the block of every tile."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.shared.slots import TILE, record_slots
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.cache import BlockTable


class Slots:
    """Slots for the tokens of a table of spans; equal for all layers.

    token: of every slot of the records, -1 for none; place: as int32. first: record of each span.
    """

    def __init__(self, spans: BlockTable, tokens: int) -> None:
        self.token, self.first = record_slots(spans, tokens)
        self.place = self.token.int()
        self._blocks: dict[int, tuple[BlockTable, Tensor]] = {}

    def block_of_tile(self, blocks: BlockTable) -> Int[Tensor, "batch tiles"]:
        """The block of each tile's first token; -1 where there is none."""
        if id(blocks) not in self._blocks:
            first = self.token[:, ::TILE]
            block = blocks.block_of_token(blocks.tokens).gather(1, first.clamp_min(0))
            self._blocks[id(blocks)] = blocks, block.masked_fill(first < 0, -1).int()
        return self._blocks[id(blocks)][1]


slots_of = once_per_table(Slots)
