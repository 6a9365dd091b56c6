"""Tokens that the queries of a step see, in the order of stores: found once for all layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from duotone.cache.index import Roll
from duotone.cache.ragged import valid_mask
from duotone.quant.checks import is_finite

HIDDEN = (
    "visual spans with a background can only be seen as a whole; this step's attention mask hides "
    "a part of them. Use a scheme without a background."
)
# Results that are kept: masks of four stores and of a step's own tokens, the check of visual ones,
# and all of them joined, in two ways. Layers that evict have stores, and so masks, of their own.
MOST = 8
# Elements of a mask above which nothing is kept: a step's memory would grow with the square of its
# tokens, and its time hardly falls.
MOST_ELEMENTS = 1 << 26
Found = TypeVar("Found")


class Visibility:
    """The model's mask of a step, and what follows from it for layers with one ledger.

    mask: [batch, queries, logical], True where a query may see a token.
    """

    def __init__(self, mask: Bool[Tensor, "batch queries logical"]) -> None:
        self.mask = mask
        self._known: list[tuple[tuple[object, ...], object]] = []

    def of(self, roll: Roll) -> Bool[Tensor, "batch queries tokens"]:
        """Arrange the mask in the order of a store."""
        return self.once(lambda: roll.visible(self.mask), roll)

    def check_whole(self, *rolls: Roll) -> None:
        """Raise ValueError where a query sees some, not all, tokens of visual stores.

        Each layer orders them by itself.
        """
        self.once(lambda: self._check_whole(rolls), *rolls)

    def once(self, find: Callable[[], Found], *of: object) -> Found:
        """Result of `find` for the objects and numbers that it reads.

        The last few results are kept, unless the mask is large.
        """
        for known, found in self._known:
            if len(known) == len(of) and all(map(_is_same, known, of)):
                return found
        found = find()
        if self.mask.numel() <= MOST_ELEMENTS:
            self._known = [*self._known[1 - MOST :], (of, found)]
        return found

    def _check_whole(self, rolls: tuple[Roll, ...]) -> None:
        seen = torch.cat([self.of(roll) for roll in rolls], 2)
        real = torch.cat([valid_mask(r.lengths, r.positions.shape[1]) for r in rolls], 1)[:, None]
        hidden = ((seen & real).any(2) & (~seen & real).any(2)).any()
        if not is_finite(torch.where(hidden, math.inf, 0.0), HIDDEN):
            raise ValueError(HIDDEN)


def _is_same(one: object, other: object) -> bool:
    """Objects are compared as such: to compare tensors, the host would wait."""
    return one is other or (isinstance(one, int) and one == other)
