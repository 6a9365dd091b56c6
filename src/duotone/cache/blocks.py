"""Blocks: consecutive tokens of one sequence that share scales.

A table of offsets describes whole spans, groups of 32 and the ragged pieces between them alike.
Blocks that hold tokens come first; a sequence with fewer blocks than others ends in empty ones:

    offsets [[0, 256, 512],      sequence 0: two images of 256 tokens
             [0, 256, 256]]      sequence 1: one image; its second block is empty
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from duotone.cache.ragged import Lengths, Move, concatenate, select, valid_mask
from duotone.tools.kept import is_capturing


def _once_for_all_layers(method: Callable) -> Callable:
    """Remember the last result for the same argument object: layers call one after the other."""

    @wraps(method)
    def remembered(self: BlockTable, argument: object) -> Any:
        memory = self.__dict__.setdefault("_results", {})
        if method.__name__ in memory and memory[method.__name__][0] is argument:
            return memory[method.__name__][1]
        result = method(self, argument)
        # Remembering the table itself would make a reference cycle.
        if result is not self and not is_capturing(self.offsets.device):
            memory[method.__name__] = (argument, result)
        return result

    return remembered


def _derived(method: Callable) -> property:
    """Remember a tensor that follows from the offsets."""
    name = method.__name__

    @wraps(method)
    def derived(self: BlockTable) -> Tensor:
        if name not in vars(self):
            result = method(self)
            if is_capturing(self.offsets.device):
                return result
            vars(self)[name] = result
        return vars(self)[name]

    return property(derived)


@dataclass(frozen=True)
class BlockTable:
    """Token offsets of each sequence's blocks; immutable, shared by all layers."""

    offsets: Int[Tensor, "batch edges"]

    @classmethod
    def uniform(cls, batch: int, tokens: int, size: int | None, device: torch.device) -> BlockTable:
        """Make whole blocks of `size` tokens (None: one of all), without waiting for the device."""
        size = tokens if size is None else size
        edges = torch.arange(0, tokens + 1, size, device=device)
        table = cls(edges.expand(batch, -1).contiguous())
        vars(table).update(longest=size, tokens=tokens, is_uniform=True)
        return table

    def is_whole(self, size: int) -> bool:
        """True where blocks hold `size` tokens, except a sequence's last block."""
        edges = torch.arange(self.offsets.shape[1], device=self.offsets.device) * size
        return bool((self.offsets == torch.minimum(edges, self.lengths[:, None])).all())

    @property
    def lengths(self) -> Lengths:
        """Tokens of each sequence."""
        return self.offsets[:, -1]

    @property
    def blocks(self) -> int:
        """Blocks per sequence, empty ones included."""
        return self.offsets.shape[1] - 1

    @_derived
    def sizes(self) -> Int[Tensor, "batch blocks"]:
        """Tokens of each block."""
        return self.offsets.diff(dim=-1)

    @_derived
    def counts(self) -> Lengths:
        """Blocks of each sequence that hold tokens; they come first."""
        return (self.sizes > 0).sum(-1)

    def same_as(self, other: BlockTable) -> bool:
        """True for a table of the same blocks of the same sequences."""
        return self is other or torch.equal(self.offsets, other.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the offsets and of the tensors derived from them so far."""
        return sum(v.nbytes for v in self.__dict__.values() if isinstance(v, Tensor))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return int(self.sizes.max()) if self.sizes.numel() else 0

    @cached_property
    def tokens(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @cached_property
    def is_uniform(self) -> bool:
        """True where all blocks have the same size: slots are then a view of the tokens."""
        return bool((self.sizes == self.longest).all())

    @property
    def index(self) -> Int[Tensor, "batch slots"]:
        """Token of slot (block, place), flattened; clamped into the sequence where empty."""
        place = torch.arange(self.longest, device=self.offsets.device)
        tokens = self.offsets[:, :-1, None] + place
        last = (self.lengths - 1).clamp_min(0)[:, None, None]
        return torch.minimum(tokens, last).flatten(1)

    @property
    def mask(self) -> Bool[Tensor, "batch blocks longest"]:
        """True at slots that hold a token."""
        place = torch.arange(self.longest, device=self.offsets.device)
        return place < self.sizes[..., None]

    @property
    def slot_of_token(self) -> Int[Tensor, "batch tokens"]:
        """Flattened slot of each token: the inverse of `index`."""
        t = torch.arange(self.tokens, device=self.offsets.device)
        block = self.block_of_token(len(t))
        return block * self.longest + t - self.offsets.gather(1, block)

    def block_of_token(self, tokens: int) -> Int[Tensor, "batch tokens"]:
        """Block of each of the first `tokens` tokens; the last block past a sequence's end."""
        t = torch.arange(tokens, device=self.offsets.device).expand(len(self.offsets), -1)
        ends = self.offsets[:, 1:].contiguous()
        block = torch.searchsorted(ends, t.contiguous(), right=True)
        return block.clamp_max(max(self.blocks - 1, 0))

    def to_slots(self, x: Shaped[Tensor, "batch heads tokens *r"]) -> Tensor:
        """[batch, heads, tokens, ...] -> [batch, heads, blocks, longest, ...]."""
        if self.blocks == 1 or self.is_uniform:
            return x[:, :, : self.blocks * self.longest].unflatten(2, (self.blocks, self.longest))
        return _gather_tokens(x, self.index).unflatten(2, (self.blocks, self.longest))

    def to_tokens(self, slots: Shaped[Tensor, "batch heads blocks longest *r"]) -> Tensor:
        """Inverse of `to_slots` (tokens past a sequence's end hold anything)."""
        if self.blocks == 1 or self.is_uniform:
            return slots.flatten(2, 3)
        last = self.blocks * self.longest - 1
        return _gather_tokens(slots.flatten(2, 3), self.slot_of_token.clamp(0, last))

    @_once_for_all_layers
    def split(self, group: int | None) -> BlockTable:
        """Cut every block into pieces of `group` tokens; the last piece of each may be shorter."""
        if group is None or not self.longest:
            return self
        pieces = -(-self.longest // group)
        steps = torch.arange(1, pieces + 1, device=self.offsets.device) * group
        ends = (self.offsets[:, :-1, None] + torch.minimum(steps, self.sizes[..., None])).flatten(1)
        starts = torch.cat([self.offsets[:, :1], ends[:, :-1]], 1)
        return _table(ends, select(ends > starts))

    @_once_for_all_layers
    def append(self, other: BlockTable) -> tuple[BlockTable, Move]:
        """Append the blocks of `other`; return also the move that joins rows of parameters."""
        move = concatenate(self.counts, other.counts, self.blocks)
        ends = torch.cat([self.offsets[:, 1:], self.lengths[:, None] + other.offsets[:, 1:]], 1)
        return _table(ends, move), move

    @_once_for_all_layers
    def truncate(self, lengths: Lengths) -> BlockTable:
        """Keep the first `lengths[b]` tokens; blocks after them become empty."""
        return BlockTable(torch.minimum(self.offsets, lengths[:, None]))

    @_once_for_all_layers
    def rows(self, index: Int[Tensor, " rows"]) -> BlockTable:
        """Pick sequences."""
        return BlockTable(self.offsets[index])


def single_block(lengths: Lengths) -> BlockTable:
    """Put all tokens of a sequence into one block."""
    return BlockTable(torch.stack([torch.zeros_like(lengths), lengths], -1))


def runs(
    mask: Bool[Tensor, "batch tokens"],
    lengths: Lengths,
    whole: Bool[Tensor, "batch tokens"] | None = None,
) -> BlockTable:
    """Blocks of the selected tokens: one per contiguous run of True in `mask`.

    lengths: selected tokens of each sequence, mask.sum(-1). whole: a mask that defines the runs
    instead; `mask` selects some of its tokens. Runs without a selected token have no block.
    """
    whole = mask if whole is None else whole
    run = (whole & ~_behind(whole)).cumsum(-1)
    # The run of the last selected token before each one; runs count from 1.
    latest = _behind((run * mask).cummax(-1).values)
    starts = mask & (run > latest)
    rank = mask.cumsum(-1) - 1
    count = int(starts.sum(-1).max()) if mask.numel() else 0
    order = torch.sort(~starts, dim=-1, stable=True).indices[:, :count]
    offsets = torch.where(
        valid_mask(starts.sum(-1), count), rank.gather(1, order), lengths[:, None]
    )
    return BlockTable(torch.cat([offsets, lengths[:, None]], -1))


def _behind(x: Shaped[Tensor, "batch tokens"]) -> Tensor:
    """Move every token's value to the next token; the first gets 0."""
    return torch.nn.functional.pad(x, (1, 0))[:, :-1]


def _table(ends: Tensor, move: Move) -> BlockTable:
    """Table of the blocks that `move` picks by their ends; empty blocks close the row."""
    if not ends.shape[1]:
        return BlockTable(torch.zeros_like(move.lengths)[:, None])
    ends = move.apply_flat(ends).masked_fill(~valid_mask(move.lengths, move.tokens), 0)
    return BlockTable(torch.nn.functional.pad(ends.cummax(-1).values, (1, 0)))


def _gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    index = index.view(index.shape[0], 1, -1, *([1] * (x.dim() - 3)))
    return x.gather(2, index.expand(*x.shape[:2], -1, *x.shape[3:]))
