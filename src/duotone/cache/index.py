"""State of a ledger: the tokens of each store at one moment, and the evicted tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from duotone.cache.ragged import Lengths, owned, valid_mask

# The stores of packed tokens.
STORES = ("visual", "background", "stream")


@dataclass(frozen=True)
class Roll:
    """Logical index of each token of one store; only the first `lengths[b]` are tokens."""

    positions: Int[Tensor, "batch tokens"]
    lengths: Lengths

    def rows(self, index: Tensor) -> Roll:
        """Pick sequences."""
        return Roll(self.positions[index], self.lengths[index])

    def trimmed(self) -> Roll:
        """Cut to the width of the longest sequence."""
        return Roll(owned(self.positions[:, : int(self.lengths.max())]), self.lengths)

    def truncate(self, end: int) -> Roll:
        """Drop tokens at logical indices >= end, which come last; self where there are none."""
        kept = (self.positions < end) & valid_mask(self.lengths, self.positions.shape[1])
        lengths = kept.sum(-1)
        if torch.equal(lengths, self.lengths):
            return self
        return Roll(owned(self.positions[:, : int(lengths.max())]), lengths)

    def visible(self, mask: Bool[Tensor, "batch queries logical"]) -> Tensor:
        """Arrange the model's mask [batch, queries, logical] in this store's order."""
        index = self.positions[:, None].expand(-1, mask.shape[1], -1)
        # Slots past the lengths hold stale indices; lengths exclude them later.
        return mask.expand(len(index), -1, -1).gather(2, index.clamp_max(mask.shape[2] - 1))

    @property
    def index_bytes(self) -> int:
        """Bytes of this bookkeeping."""
        return self.positions.nbytes + self.lengths.nbytes


@dataclass(frozen=True)
class Evicted:
    """Tokens that were dropped from the prompt: like padding, they are stored nowhere.

    tokens: their number. visual: number of those whose policy is a packed visual span. end: logical
    length of the prompt that they were dropped from.
    """

    tokens: Lengths
    visual: Lengths
    end: int = 0

    def rows(self, index: Tensor) -> Evicted:
        """Pick sequences."""
        return Evicted(self.tokens[index], self.visual[index], self.end)

    def truncate(self, end: int) -> Evicted:
        """Return self; raise where the choice depends on tokens that would be dropped."""
        if end < self.end:
            raise ValueError(
                f"a prompt whose tokens were evicted can only be kept whole: expected a crop to "
                f">= {self.end} tokens; got {end}. Start again with a new cache."
            )
        return self


@dataclass(frozen=True)
class LedgerState:
    """Stores of all tokens at one moment. Immutable: plans keep the state before and after.

    streamed: True at dense tokens of the text stream; other dense tokens stay dense for good.
    evicted: tokens, other than padding, that are stored nowhere.
    seen: logical length, padding included.
    wholes: logical ends (first, last + 1) of spans that have a background, in order. Each layer
    orders the tokens of such a span, so only the whole span has positions: its first positions
    count as `visual`.
    """

    visual: Roll
    background: Roll
    stream: Roll
    dense: Roll
    streamed: Bool[Tensor, "batch capacity"]
    evicted: Evicted
    seen: int
    wholes: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> int:
        """Logical end of the last span that has a background."""
        return self.wholes[-1][1] if self.wholes else 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state; some stores share empty ones."""
        rolls = (*(getattr(self, name) for name in STORES), self.dense)
        held = [x for roll in rolls for x in (roll.positions, roll.lengths)]
        return [*held, self.streamed, self.evicted.tokens, self.evicted.visual]

    @property
    def tokens(self) -> Lengths:
        """Tokens of each sequence, evicted ones included."""
        stored = (self.visual, self.background, self.stream, self.dense)
        return sum((roll.lengths for roll in stored), self.evicted.tokens)

    def stored(self) -> Bool[Tensor, "batch seen"]:
        """True at tokens that are stored: neither padding nor evicted."""
        found = self.streamed.new_zeros(len(self.streamed), self.seen + 1)
        for roll in (*(getattr(self, name) for name in STORES), self.dense):
            is_there = valid_mask(roll.lengths, roll.positions.shape[1])
            # Slots without a token go to one place more, which is cut off.
            found.scatter_(1, roll.positions.long().where(is_there, self.seen), True)
        return found[:, :-1]

    def movable(self, sink: int) -> Bool[Tensor, "batch capacity"]:
        """True at dense tokens that leave the window some day: all streamed ones but the sinks."""
        streamed = self.streamed & valid_mask(self.dense.lengths, self.streamed.shape[1])
        # Sinks never leave, so the first streamed tokens of the store are the sinks.
        return streamed & (streamed.cumsum(-1) > sink)

    def rows(self, index: Tensor) -> LedgerState:
        """Pick sequences."""
        picked = self.reordered(index)
        # As wide as the packed tensors, which are trimmed.
        return replace(picked, **{name: getattr(picked, name).trimmed() for name in STORES})

    def reordered(self, index: Int[Tensor, " batch"]) -> LedgerState:
        """Pick sequences for stores that keep the width that they have."""
        rolls = {name: getattr(self, name).rows(index) for name in (*STORES, "dense")}
        evicted = self.evicted.rows(index)
        return replace(self, **rolls, streamed=self.streamed[index], evicted=evicted)

    def truncate(self, end: int) -> LedgerState:
        """Forget tokens at logical indices >= end."""
        wholes = tuple(whole for whole in self.wholes if whole[0] < end)
        if wholes and end < wholes[-1][1]:
            raise ValueError(
                "spans with a background can only be kept whole: expected a crop to "
                f">= {wholes[-1][1]} tokens; got {end}. Start again with a new cache."
            )
        rolls = {n: getattr(self, n).truncate(end) for n in (*STORES, "dense")}
        streamed = owned(self.streamed[:, : rolls["dense"].positions.shape[1]])
        evicted = self.evicted.truncate(end)
        held = {"streamed": streamed, "evicted": evicted, "seen": end, "wholes": wholes}
        return replace(self, **rolls, **held)
