"""Windows of the latest tokens: they grow as transformers' own, or lie in rings that hold still.

A ring has a slot per token that the window sees, and token t is in slot t mod window. All places
are on the device, so a captured step repeats. Attention needs no order: keys know their positions.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

EMPTY = -1  # place of a slot without a token, or with padding


class RingPlaces:
    """Places of the tokens in the rings of one cache.

    now, slot [batch]: the step's token and its slot. places [batch, window]: of each slot's token.
    first [batch]: the first token that is no padding. seen [batch, window]: what the step sees.
    is_chunked: a query sees the tokens of its own chunk alone; chunks begin at `first`.
    """

    TENSORS = ("now", "slot", "places", "first", "seen")

    def __init__(self, real: Bool[Tensor, "batch tokens"], window: int, is_chunked: bool) -> None:
        batch, length = real.shape
        self.window, self.is_chunked = window, is_chunked
        self.now = torch.full((batch,), length - 1, device=real.device)
        self.slot = self.now % window
        self.first = real.int().argmax(-1)
        self.places = torch.full((batch, window), EMPTY, device=real.device)
        last = _last(length, window, real.device)
        self.places[:, last % window] = torch.where(real[:, last], last, EMPTY)
        self.seen = self.places != EMPTY

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: getattr(self, name) for name in self.TENSORS}

    def advance(self) -> None:
        """Begin a step of one token per sequence."""
        self.now += 1
        torch.remainder(self.now, self.window, out=self.slot)
        self.places.scatter_(1, self.slot[:, None], self.now[:, None])
        torch.ne(self.places, EMPTY, out=self.seen)
        if self.is_chunked:
            chunk = (self.places - self.first[:, None]).div(self.window, rounding_mode="floor")
            own = (self.now - self.first).div(self.window, rounding_mode="floor")
            self.seen &= chunk == own[:, None]


class FixedStates:
    """K or V of a layer in fixed buffers: another attention function fails on it by its type."""

    def to(self, device: torch.device) -> Self:
        """Return itself: in transformers 5.17 a layer moves another one's states to its device."""
        return self


class RingStates(FixedStates):
    """K or V of a ring [batch, kv_heads, window, head_dim], and which slots a step's query sees."""

    def __init__(self, kept: Tensor, seen: Bool[Tensor, "batch window"]) -> None:
        self.kept, self.mask = kept, seen[:, None, None]

    @property
    def shape(self) -> torch.Size:
        """Shape of all slots."""
        return self.kept.shape


class WindowLayer(DynamicSlidingWindowLayer):
    """transformers' window, whose `keys` and `values` are a ring while `places` is set."""

    places: RingPlaces | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take this step's states; returns what attention reads."""
        if self.places is None:
            # transformers 5.17 returns recorded tokens as well, which no mask covers.
            visible = self.sliding_window - 1 + key_states.shape[2]
            grown = super().update(key_states, value_states, *args, **kwargs)
            return tuple(states[:, :, -visible:] for states in grown)
        slot = self.places.slot.view(-1, 1, 1, 1)
        self.keys.scatter_(2, slot.expand_as(key_states), key_states)
        self.values.scatter_(2, slot.expand_as(value_states), value_states)
        seen = self.places.seen
        return RingStates(self.keys, seen), RingStates(self.values, seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens, offset) that the model's mask covers; a ring needs none of it."""
        return (query_length, 0) if self.places else super().get_mask_sizes(query_length)

    def hold_still(self, places: RingPlaces) -> None:
        """Move the window into a ring."""
        window = self.sliding_window
        slots = _last(self.cumulative_length, window, self.keys.device) % window
        for name in ("keys", "values"):
            grown = getattr(self, name)
            # Zeros: attention multiplies hidden slots by 0.
            ring = grown.new_zeros(*grown.shape[:2], window, grown.shape[3])
            ring[:, :, slots] = grown
            setattr(self, name, ring)
        self.places = places

    def thaw(self, length: int) -> None:
        """Move the ring's last tokens into a window that grows. length: logical one, by now."""
        self.places, self.cumulative_length = None, length
        slots = _last(length, self.sliding_window, self.keys.device) % self.sliding_window
        self.keys, self.values = self.keys[:, :, slots], self.values[:, :, slots]


def _last(length: int, window: int, device: torch.device) -> Int[Tensor, " tokens"]:
    """Tokens of the first `length` that the next one sees."""
    return torch.arange(max(length - window + 1, 0), length, device=device)
