"""Tokens that a cache packed while its answers were compared, and what that proves of a spec.

A window can be longer than all samples. Codes of such a spec are never read, so its distance from
16 bit says nothing about them. Tokens count as packed once a compared token has seen their codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duotone.cache.index import STORES, LedgerState
from duotone.quant import CacheSpec, KVSpec

# Policy of a spec -> store of its packed tokens.
STORE_OF = {"visual": "visual", "background": "background", "text": "stream"}


@dataclass(frozen=True)
class Packed:
    """Tokens of some caches, and of these the tokens in every store of codes."""

    tokens: int = 0
    visual: int = 0
    background: int = 0
    stream: int = 0
    sequences: int = 0

    def __add__(self, other: Packed) -> Packed:
        return Packed(
            self.tokens + other.tokens,
            self.visual + other.visual,
            self.background + other.background,
            self.stream + other.stream,
            self.sequences + other.sequences,
        )

    @property
    def share(self) -> float:
        """Share of all tokens that are packed."""
        return (self.visual + self.background + self.stream) / max(1, self.tokens)

    @property
    def length(self) -> float:
        """Mean tokens per sequence."""
        return self.tokens / max(1, self.sequences)

    def never(self, spec: CacheSpec) -> list[str]:
        """Policies of the spec of which no token was packed."""
        return [
            policy
            for policy, store in STORE_OF.items()
            if isinstance(getattr(spec, policy), KVSpec) and not getattr(self, store)
        ]


def packed_of(cache: Any, seen: LedgerState | None) -> Packed:
    """Tokens of a cache, and of these the tokens that were packed in an earlier state."""
    end = cache.ledger.state
    stores = {} if seen is None else {name: getattr(seen, name) for name in STORES}
    packed = {name: int(roll.lengths.sum()) for name, roll in stores.items()}
    tokens = sum(int(getattr(end, name).lengths.sum()) for name in (*STORES, "dense"))
    return Packed(tokens, **packed, sequences=len(end.dense.lengths))


class Watch:
    """Keeps the state of a cache that its latest step saw."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.steps = cache, 0
        self.state: LedgerState | None = None

    @property
    def packed(self) -> Packed:
        """Tokens in that state, of all that the cache holds now."""
        return packed_of(self.cache, self.state)

    def before(self, steps: Iterable[slice]) -> Iterator[slice]:
        """Pass on steps of several tokens: a cache flushes after each one."""
        for step in steps:
            self.state = self.cache.ledger.state
            yield step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the logits of a prompt, then of single tokens: a cache flushes before each."""
        self.state = self.cache.ledger.state if self.steps else None
        self.steps += 1
        return scores


def packed_by(tasks: Mapping[str, Any]) -> Packed:
    """Packed tokens of all measurements {task: Measured} together."""
    return sum((measured.packed for measured in tasks.values()), Packed())


def unproved(spec: CacheSpec, tasks: Mapping[str, Any]) -> str:
    """Reason why measurements {task: Measured} prove nothing of a spec; "" where they do."""
    for name, measured in tasks.items():
        if not measured.rows[:, 2].sum():
            return f"no token of an answer of {name!r} was compared"
    total = packed_by(tasks)
    if never := total.never(spec):
        return (
            f"no token of its {' and '.join(never)} codes was packed in caches of "
            f"{total.length:.0f} tokens"
        )
    return ""
