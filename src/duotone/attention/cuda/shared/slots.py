"""Slots of records: the token of each of them, and records that join.

Every block of tokens starts a record, whose last slots are filled up.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.shared.filling import filled_tiles
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.cache import BlockTable
from duotone.cache.ragged import Move, concatenate

# Tokens of a tile of records of spans and of classes.
TILE = 64


@once_per_table
def record_slots(blocks: BlockTable, tokens: int) -> tuple[Tensor, Tensor]:
    """(token of every slot of the records [batch, slots], -1 where filled up; first records).

    tokens: per record.
    """
    first, device = first_records(blocks, tokens), blocks.sizes.device
    slots = filled_tiles(blocks, TILE)[tokens // TILE] * TILE
    token = torch.full((len(first), slots + 1), -1, device=device)
    for b in range(blocks.blocks):
        place = torch.arange(blocks.longest, device=device).expand(len(first), -1)
        real = place < blocks.sizes[:, b, None]
        slot = torch.where(real, first[:, b, None] * tokens + place, slots)
        token.scatter_(1, slot, torch.where(real, blocks.offsets[:, b, None] + place, -1))
    return token[:, :slots], first.int()


def first_records(blocks: BlockTable, tokens: int) -> Int[Tensor, "batch blocks"]:
    """First record of each block. tokens: per record."""
    counts = -(-blocks.sizes // tokens)
    return counts.cumsum(-1) - counts


@once_per_table
def joined_records(
    held: BlockTable, more: BlockTable, tokens: int, width: int
) -> tuple[Move, Int[Tensor, "batch blocks"]]:
    """(move that joins the records of two tables' blocks, first record of each block of both).

    tokens: per record. width: records of a row of `held`, which may end before it: other sequences
    had more. The host waits once for the number of records.
    """
    counts = [(-(-table.sizes // tokens)).sum(-1) for table in (held, more)]
    first = first_records(held.append(more)[0], tokens)
    return concatenate(*counts, width), first.int()


def joined(join: Move, held: Tensor, more: Tensor) -> Tensor:
    """Rows of two tensors along their third axis, contiguous."""
    return join.pick(torch.cat([held, more], 2)).contiguous()


def slot_of_token(token: Int[Tensor, "batch slots"], tokens: int) -> Int[Tensor, "batch tokens"]:
    """Inverse of the tokens of `record_slots`; 0 past a sequence's end."""
    place = token.new_zeros(len(token), tokens + 1)
    index = torch.arange(token.shape[1], device=token.device).expand_as(token)
    place.scatter_(1, token.where(token >= 0, torch.full_like(token, tokens)), index)
    return place[:, :tokens]


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
