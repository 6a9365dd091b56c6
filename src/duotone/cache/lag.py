"""V of the newest packed tokens, kept in 16 bit as well (`TensorSpec.lag`).

KIVI's code packs V one token at a time and later than K. Here both leave the window together, and
a copy of V stands in for its codes until a token is old enough:

    stream, packed   | old tokens: codes of K and V | newest: codes of K, exact V |
    window, 16 bit                                                                | K and V |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.cache.ragged import Lengths, Move, concatenate, valid_mask


@dataclass(frozen=True)
class Lagging:
    """Exact V of the last packed tokens of each sequence, the oldest first.

    values: 0 past a sequence's length. lengths: tokens of each sequence. used: how many of the
    newest of them attention reads; None: all.
    """

    values: Float[Tensor, "batch kv_heads tokens channels"]
    lengths: Lengths
    used: Lengths | None = None

    @classmethod
    def joined(
        cls,
        old: Lagging | None,
        new: Float[Tensor, "batch kv_heads more channels"],
        count: Lengths,
        most: int,
    ) -> Lagging:
        """Append `count` tokens of `new`, and keep the last `most`."""
        values, lengths = new, count
        if old is not None:
            move = concatenate(old.lengths, count, old.values.shape[2])
            values, lengths = move.apply(torch.cat([old.values, new], 2)), move.lengths
        kept = lengths.clamp_max(most)
        place = torch.arange(int(kept.max()), device=kept.device)
        index = (lengths - kept)[:, None] + place
        values = Move(index.clamp_max(max(values.shape[2] - 1, 0)), kept).apply(values)
        real = valid_mask(kept, values.shape[2])[:, None, :, None]
        return cls(values.masked_fill(~real, 0), kept)

    def newest(self, tokens: Lengths) -> Lagging:
        """Let attention read at most so many of each sequence."""
        return Lagging(self.values, self.lengths, tokens.clamp_min(0).minimum(self.lengths))

    def cut(self, before: Lengths, after: Lengths) -> Lagging:
        """Forget tokens of a stream of `before` tokens that keeps its first `after` ones."""
        kept = (after - (before - self.lengths)).clamp_min(0).minimum(self.lengths)
        width = int(kept.max())
        real = valid_mask(kept, width)[:, None, :, None]
        return Lagging(self.values[:, :, :width].masked_fill(~real, 0), kept)

    def rows(self, index: Tensor) -> Lagging:
        """Pick sequences."""
        return Lagging(self.values[index], self.lengths[index])

    def into(
        self, decoded: Float[Tensor, "batch kv_heads stream channels"], stream: Lengths
    ) -> Float[Tensor, "batch kv_heads stream channels"]:
        """Replace decoded V of streams of `stream` tokens by the exact ones that are read."""
        place = torch.arange(self.values.shape[2], device=stream.device)
        used = self.lengths if self.used is None else self.used
        read = (place >= (self.lengths - used)[:, None]) & (place < self.lengths[:, None])
        at = ((stream - self.lengths)[:, None] + place).clamp(0, max(decoded.shape[2] - 1, 0))
        index = at[:, None, :, None].expand(*decoded.shape[:2], -1, decoded.shape[3])
        new = torch.where(
            read[:, None, :, None], self.values.to(decoded.dtype), decoded.gather(2, index)
        )
        return decoded.scatter(2, index, new)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.values.nbytes
