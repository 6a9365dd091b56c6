"""Lengths and slots of the tokens of a cache with fixed buffers, on the device.

A new token and a flush change the dense store of a row:

    | fixed: sinks, dense spans | ring: `recent` slots | staged: `group` slots |

The slot of a new token is always the number of dense tokens. When the staged slots are full, the
`group` oldest tokens leave for the stream. The staged tokens take the freed slots in the ring, and
the ring's head moves on. A flush thus copies `group` tokens, not the window, and the tokens stay a
prefix. The schedule is the ledger's (`Ledger._flush`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from duotone.cache.index import Evicted, LedgerState
from duotone.cache.ragged import Lengths, Move, valid_mask
from duotone.quant import CacheSpec, KVSpec


@dataclass(frozen=True)
class StaticPlaces:
    """Lengths and slots of the tokens of one ledger's layers; all tensors change in place.

    dense, stream: tokens of either store, the current step's token included. at: slot of the
    current step's token. fixed: slots before the ring. head: the ring's oldest slot.
    visual, background: packed visual tokens, constant. recent, group: sizes of ring and staging;
    group 0: no token ever leaves. dense_tokens, stream_tokens: allocated slots. movable: tokens of
    each sequence that were in ring and staging at the start, on the host (below 0: missing sinks).
    new_tokens: room for new tokens per sequence. evicted: tokens of the prompt that are stored
    nowhere.
    """

    dense: Lengths
    stream: Lengths
    at: Lengths
    fixed: Lengths
    head: Lengths
    visual: Lengths
    background: Lengths
    recent: int
    group: int
    dense_tokens: int
    stream_tokens: int
    movable: tuple[int, ...]
    new_tokens: int
    evicted: Evicted

    @classmethod
    def of(
        cls, state: LedgerState, spec: CacheSpec, new_tokens: int, multiple: int = 1
    ) -> tuple[StaticPlaces, Move]:
        """Make places for `new_tokens` more tokens, and the order in which dense tokens enter.

        multiple: allocated slots are a multiple of it; prompts of near lengths so have equal sizes.
        The lengths are copied from the device, once.
        """
        lengths = state.dense.lengths
        valid = valid_mask(lengths, state.dense.positions.shape[1])
        streamed = state.streamed & valid
        leaving = streamed & (streamed.cumsum(-1) > spec.sink)
        has_stream = isinstance(spec.text, KVSpec)
        still = (valid & ~streamed).sum(-1)
        fixed = still + spec.sink if has_stream else lengths
        movable, row_fixed = (lengths - fixed).tolist(), fixed.tolist()
        group = spec.flush_tokens if has_stream else 0
        if group:
            room = [
                min(f + m + new_tokens, f + spec.recent + group)
                for f, m in zip(row_fixed, movable, strict=True)
            ]
        else:
            room = [f + new_tokens for f in row_fixed]
        flushes = [flush_count(m, new_tokens, spec.recent, group) for m in movable]
        packed = state.stream.lengths.tolist()
        if group and any(length % group for length in packed):
            raise ValueError(
                f"a stream that is frozen must consist of whole groups of {group} tokens; got "
                f"{packed}. It was cropped inside a group: prefill again."
            )
        places = cls(
            dense=lengths.clone(),
            stream=state.stream.lengths.clone(),
            at=lengths.clone(),
            fixed=fixed.clone(),
            head=torch.zeros_like(lengths),
            visual=state.visual.lengths.clone(),
            background=state.background.lengths.clone(),
            recent=spec.recent,
            group=group,
            dense_tokens=_rounded_up(max(room), multiple),
            stream_tokens=_rounded_up(
                max(p + group * n for p, n in zip(packed, flushes, strict=True)),
                math.lcm(multiple, group or 1),
            ),
            movable=tuple(movable),
            new_tokens=new_tokens,
            evicted=state.evicted,
        )
        return places, _fixed_first(valid, leaving)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        own = (self.dense, self.stream, self.at, self.fixed, self.head)
        spans = (self.visual, self.background, self.evicted.tokens, self.evicted.visual)
        return [*own, *spans]

    def is_due(self, step: int) -> bool:
        """True where a sequence has full staged slots before step `step` (from 0); never waits."""
        over = (m + step - self.recent - self.group for m in self.movable)
        return self.group > 0 and any(n >= 0 and n % self.group == 0 for n in over)

    def full(self) -> Bool[Tensor, " batch"]:
        """True at sequences that have full staged slots."""
        return self.dense - self.fixed == self.recent + self.group

    def advance(self) -> None:
        """Make room for one token per sequence."""
        self.at.copy_(self.dense)
        self.dense.add_(1)

    def leaving(self) -> Int[Tensor, "batch group"]:
        """Slots of the `group` oldest movable tokens, the oldest first."""
        age = torch.arange(self.group, device=self.dense.device)
        ring = (self.head[:, None] + age) % max(self.recent, 1)
        return self._slots(torch.where(age < self.recent, ring, age))

    def staged(self) -> tuple[Int[Tensor, "batch moved"], Int[Tensor, "batch moved"]]:
        """(slots of staged tokens that stay, their new slots in the ring)."""
        staged = torch.arange(
            max(self.group - self.recent, 0), self.group, device=self.dense.device
        )
        ring = (self.head[:, None] + staged) % max(self.recent, 1)
        return self._slots((self.recent + staged).expand_as(ring)), self._slots(ring)

    def _slots(self, offset: Tensor) -> Tensor:
        # Rows that are not full may point past the buffer; they write back what they read.
        return (self.fixed[:, None] + offset).clamp_max(self.dense_tokens - 1)

    def turn(self, full: Bool[Tensor, " batch"]) -> None:
        """Count a flush, once all layers have made it."""
        gone = full.long() * self.group
        self.dense.sub_(gone)
        self.stream.add_(gone)
        self.head.copy_((self.head + gone) % max(self.recent, 1))


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flush_count(movable: int, new_tokens: int, recent: int, group: int) -> int:
    """Number of groups that leave a window of `movable` tokens while `new_tokens` enter it."""
    if not group or not new_tokens:
        return 0
    return max(0, (movable + new_tokens - 1 - recent) // group)


def _fixed_first(valid: Tensor, leaving: Tensor) -> Move:
    """Order tokens: the ones that stay for good, then the ones that leave later."""
    rank = torch.where(leaving, 1, 0) + torch.where(valid, 0, 2)
    return Move(torch.sort(rank, dim=-1, stable=True).indices, valid.sum(-1))
