"""True bits on one axis for all schemes: every byte that holds the tokens in question.

`visual_bits_per_element` of `MemoryReport` covers packed visual spans only, and a stream (KIVI) has
none. Here visual tokens count in every store:

    bytes = packed visual spans + their share of the packed stream + their share of the 16-bit store

with the shares by tokens, scales and index included. For a scheme of visual spans this is
`visual_bits_per_element` exactly; for a stream, the window's visual tokens count 16 bits each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool
from torch import Tensor

from duotone.cache.index import STORES

BitsOf = Literal["visual", "cache"]


@dataclass(frozen=True)
class Held:
    """Bytes that hold `elements` numbers of K and V of `sequences` sequences."""

    held_bytes: float = 0.0
    elements: int = 0
    sequences: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.held_bytes + other.held_bytes,
            self.elements + other.elements,
            self.sequences + other.sequences,
        )

    @property
    def bits(self) -> float:
        """True bits per number."""
        return 8 * self.held_bytes / self.elements

    @property
    def bytes_per_sequence(self) -> float:
        """Mean over sequences."""
        return self.held_bytes / self.sequences


def _visual_share(roll: Any, visual: Tensor) -> float:
    """Share of a store's tokens that are visual; 0 of an empty one."""
    total = int(roll.lengths.sum())
    if not total:
        return 0.0
    place = roll.positions.long()
    valid = _arange(place) < roll.lengths[:, None]
    inside = place < visual.shape[1]
    is_visual = visual.gather(1, place.clamp(0, visual.shape[1] - 1)) & inside & valid
    return int(is_visual.sum()) / total


def _arange(like: Tensor) -> Tensor:
    return like.new_ones(like.shape).cumsum(-1) - 1


def held(cache: Any, visual_mask: Bool[Tensor, "batch tokens"], of: BitsOf) -> Held:
    """Bytes that the cache holds of its visual tokens, or of all tokens.

    visual_mask: True at the prompt's visual tokens. Windows, states and pictures that stay
    transformers' own do not count, as in bits per number.
    """
    memory, state, facts = cache.memory(), cache.ledger.state, cache.facts
    batch = len(visual_mask)
    per_token = facts.elements
    held_bytes = memory.total_bytes - memory.state_bytes
    if of == "cache":
        tokens = sum(int(getattr(state, n).lengths.sum()) for n in (*STORES, "dense"))
        return Held(held_bytes, tokens * per_token, batch)
    mask = visual_mask.to(state.dense.lengths.device).bool()
    packed_bytes = held_bytes - memory.visual_bytes - memory.dense_bytes
    shared = packed_bytes * _visual_share(state.stream, mask)
    shared += memory.dense_bytes * _visual_share(state.dense, mask)
    return Held(memory.visual_bytes + shared, int(mask.sum()) * per_token, batch)
