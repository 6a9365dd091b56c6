"""A prefilled 16-bit cache taken over into a timeline, as if that had been there."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from duotone.hf.cache.timeline import Timeline
from duotone.hf.model.masks import real_tokens


def absorb(
    timeline: Timeline, dense: Cache, visual_mask: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Store the tokens of `dense`; `QuantizedCache.absorb` has arguments and errors."""
    _check(timeline, dense)
    batch, _, tokens, _ = dense.layers[0].keys.shape
    device = dense.layers[0].keys.device
    real = real_tokens(attention_mask, batch, tokens, device)
    none = torch.zeros_like(real)
    visual = none if visual_mask is None else visual_mask.to(device).bool()
    timeline.begin(visual, real)
    try:
        for index, number in enumerate(timeline.facts.packed):
            timeline.take(index, dense.layers[number].keys, dense.layers[number].values)
        for number, layer in timeline.own.windows.items():
            layer.update(dense.layers[number].keys, dense.layers[number].values)
    finally:
        timeline.end()


def _check(timeline: Timeline, dense: Cache) -> None:
    """Raise ValueError for a cache with tokens or eviction, and for layers that do not fit."""
    if timeline.spec.evict is not None:
        raise ValueError(
            "absorb needs a scheme that keeps all tokens; this one evicts some by the scores "
            "of queries, which a dense cache does not hold. Run the model with this cache."
        )
    if timeline.own.states or timeline.own.crosses:
        raise ValueError(
            "absorb takes over K and V only, and layers of this model keep states or pictures as "
            "well. Run the model with this cache."
        )
    if timeline.facts.spares_prompt:
        raise ValueError(
            "absorb does not know where a prompt ends, which windows of this model spare. Run the "
            "model with this cache."
        )
    if length := timeline.length:
        raise ValueError(f"absorb needs an empty cache; this one holds {length} tokens.")
    held = {getattr(layer, "keys", None) is not None and layer.keys.shape[2]
            for layer in dense.layers}  # fmt: skip
    count = len(timeline.stores) + len(timeline.own.layers)
    if len(dense.layers) != count or len(held) != 1 or not all(held):
        raise ValueError(
            f"expected {count} layers with K and V of the same tokens; got "
            f"{len(dense.layers)} layers of {sorted(map(int, held))} tokens. "
            "Sliding-window layers forget tokens: prefill without them."
        )
