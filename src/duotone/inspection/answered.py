"""A batch with known answers, and the few-bit K and V that the answers' queries would see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.cache import Ledger
from duotone.cache.index import STORES, LedgerState
from duotone.cache.ragged import valid_mask
from duotone.cache.saliency import Spans, foreground_first
from duotone.inference.batch import Batch, make_cache
from duotone.quant import CacheSpec

from .queries import QueryRecorder
from .scores import Attention

Heads = Float[Tensor, "batch kv_heads tokens head_dim"]


def packed_tokens(state: LedgerState, length: int) -> Bool[Tensor, "batch length"]:
    """True at logical indices whose token is in one of the packed stores."""
    rolls = [getattr(state, name) for name in STORES]
    found = torch.zeros(len(rolls[0].lengths), length, dtype=torch.long)
    found = found.to(rolls[0].lengths.device)
    for roll in rolls:
        # Slots past the lengths hold stale indices, and add nothing.
        valid = valid_mask(roll.lengths, roll.positions.shape[1]).long()
        found.scatter_add_(1, roll.positions.long().clamp_max(length - 1), valid)
    return found > 0


@dataclass(frozen=True)
class HeldLayer:
    """One layer of a dense cache."""

    keys: Heads
    values: Heads


@dataclass(frozen=True)
class Held:
    """Input of `QuantizedCache.absorb`: views of a dense cache's first tokens."""

    layers: list[HeldLayer]


@dataclass(frozen=True)
class Answered:
    """A batch, the 16-bit cache of prompts and answers, and the answers' queries."""

    batch: Batch
    dense: Any
    recorder: QueryRecorder

    @property
    def prompt_tokens(self) -> int:
        """Tokens per sequence, padding included."""
        return self.batch.attention_mask.shape[1]

    def quantized(self, model: Any, spec: CacheSpec) -> Any:
        """A cache of this spec that holds the prompts."""
        cut = slice(0, self.prompt_tokens)
        held = [HeldLayer(x.keys[:, :, cut], x.values[:, :, cut]) for x in self.dense.layers]
        cache = make_cache(model, spec, self.batch, "reference")
        masks = {"visual_mask": self.batch.visual_mask, "attention_mask": self.batch.attention_mask}
        cache.absorb(Held(held), **masks)
        return cache

    def shown(self, cache: Any, layer: int) -> Bool[Tensor, "batch prompt"]:
        """Mask of tokens whose scores count: visual tokens, or a text model's packed tokens."""
        if self.recorder.facts.is_multimodal:
            return self.batch.visual_mask & self.batch.attention_mask.bool()
        return packed_tokens(cache.steps.state(layer), self.prompt_tokens)

    def states(self, cache: Any, layer: int) -> tuple[tuple[Heads, Heads], tuple[Heads, Heads]]:
        """((K, V) in 16 bit, (K, V) as `cache` has them), answers included, in one order.

        The order is the cache's: spans with a background are sorted by saliency, head by head.
        """
        dense, cut = self.dense.layers[layer], self.prompt_tokens
        exact = dense.keys[:, :, :cut], dense.values[:, :, :cut]
        spec = cache.layers[layer].store.spec
        spans = self._spans(spec)
        if spans is not None:
            exact = foreground_first(*exact, spans, spec.visual.key.transform)
        names = ("key", "value")
        coded = [cache.layers[layer].materialize(*of) for of in zip(names, exact, strict=True)]
        tails = dense.keys[:, :, cut:], dense.values[:, :, cut:]

        def whole(*parts: Sequence[Heads]) -> tuple[Heads, Heads]:
            return tuple(torch.cat(both, 2) for both in zip(*parts, strict=True))

        return whole(exact, tails), whole(coded, tails)

    def _spans(self, spec: CacheSpec) -> Spans | None:
        """The prompt's spans whose tokens a layer with a background has put in another order."""
        real = self.batch.attention_mask.bool()
        visual = self.batch.visual_mask.to(real.device).bool()
        return Ledger(spec, len(real), real.device).plan(visual, real).spans


def sequences(
    answered: Answered, cache: Any, layer: int
) -> Iterator[tuple[Attention, tuple[Tensor, Tensor], Bool[Tensor, " tokens"]]]:
    """(exact attention, coded (K, V), tokens shown) of every sequence with queries, no padding."""
    queries = answered.recorder.kept[layer]
    exact, coded = answered.states(cache, layer)
    more = exact[0].shape[2] - answered.prompt_tokens
    pad = torch.nn.functional.pad
    real = pad(answered.batch.attention_mask.bool(), (0, more), value=True)
    visual = pad(answered.batch.visual_mask, (0, more))
    shown = pad(answered.shown(cache, layer), (0, more))
    for row in range(len(real)):
        query, places = queries.of_sequence(row)
        if not len(places):
            continue
        own = real[row].nonzero()[:, 0]
        states = [x[row][:, own] for x in (*exact, *coded)]
        masks = own <= places[:, None], visual[row][own]
        attention = Attention(query, *states[:2], *masks, queries.sm_scale)
        yield attention, tuple(states[2:]), shown[row][own]
