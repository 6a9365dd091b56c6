"""Rows of different lengths in one tensor: valid tokens first, anything after them.

A `Move` says for each sequence which token of a source becomes token t of the result. It is made
once per step from lengths and masks, and applied to every tensor of every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

Lengths = Int[Tensor, " batch"]


def valid_mask(lengths: Lengths, tokens: int) -> Bool[Tensor, "batch {tokens}"]:
    """True at the first `lengths[b]` of `tokens` tokens."""
    return torch.arange(tokens, device=lengths.device) < lengths.unsqueeze(-1)


def owned(x: Tensor) -> Tensor:
    """Return x, or a copy where x is part of a larger tensor that it would keep in memory."""
    if x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that some tensors keep in memory; shared memory counts once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class Move:
    """Move of tokens: token t of sequence b of the result is token index[b, t] of the source.

    lengths: valid tokens of the result. Past them the index points at any token of the source.
    """

    index: Int[Tensor, "batch tokens"]
    lengths: Lengths

    @classmethod
    def consecutive(cls, start: int, tokens: int, lengths: Lengths) -> Move:
        """Take consecutive tokens, without waiting for the device."""
        count = torch.arange(start, start + tokens, device=lengths.device)
        move = cls(count.expand(len(lengths), -1).contiguous(), lengths)
        vars(move)["start"] = start
        return move

    @property
    def tokens(self) -> int:
        """Width of the result."""
        return self.index.shape[1]

    def apply(self, source: Shaped[Tensor, "batch heads n *rest"]) -> Tensor:
        """Gather along the token axis of [batch, kv_heads, tokens, ...]."""
        index = self.index.view(self.index.shape[0], 1, -1, *([1] * (source.dim() - 3)))
        shape = (*source.shape[:2], self.tokens, *source.shape[3:])
        if not source.shape[2]:
            return source.new_zeros(shape)
        return source.gather(2, index.expand(shape))

    @cached_property
    def start(self) -> int | None:
        """First of consecutive tokens, equal in all sequences; None for any other move.

        The host waits once.
        """
        if not self.index.numel():
            return None
        count = torch.arange(self.tokens, device=self.index.device)
        is_run = (self.index == self.index[:1, :1] + count).all()
        first, found = torch.stack([self.index[0, 0], is_run.long()]).tolist()
        return first if found else None

    def holds_groups_of(self, tokens: int) -> bool:
        """True where every sequence gets whole groups of so many tokens. The host waits once."""
        known = self.__dict__.setdefault("_groups", {})
        if tokens not in known:
            known[tokens] = not bool((self.lengths % tokens).any())
        return known[tokens]

    def pick(self, source: Shaped[Tensor, "batch heads n *rest"]) -> Tensor:
        """`apply`, as a view of the source where this is possible."""
        if self.start is None:
            return self.apply(source)
        return source[:, :, self.start : self.start + self.tokens]

    def rows(self, index: Int[Tensor, " rows"]) -> Move:
        """Pick sequences."""
        return Move(self.index[index], self.lengths[index])

    def apply_flat(self, source: Shaped[Tensor, "batch n"]) -> Tensor:
        """Gather one value per token, [batch, tokens]."""
        return self.apply(source[:, None]).squeeze(1)


def select(mask: Bool[Tensor, "batch tokens"]) -> Move:
    """Compact: move the tokens where `mask` is True, in their order, to the front."""
    lengths = mask.sum(-1)
    # A stable sort of "not wanted" brings the wanted tokens to the front in order.
    order = torch.sort(~mask, dim=-1, stable=True).indices
    return Move(order[:, : int(lengths.max())], lengths)


def concatenate(first: Lengths, second: Lengths, first_tokens: int, spare: int = 0) -> Move:
    """Join two ragged rows; the source is their concatenation along the token axis.

    first_tokens: width of the first tensor. spare: unused tokens to leave at the end.
    """
    lengths = first + second
    tokens = int(lengths.max()) + spare
    t = torch.arange(tokens, device=first.device).expand(len(first), -1)
    index = torch.where(t < first[:, None], t, t - first[:, None] + first_tokens)
    return Move(index.masked_fill(t >= lengths[:, None], 0), lengths)
