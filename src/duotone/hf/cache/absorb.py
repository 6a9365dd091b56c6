"""A prefilled 16-bit cache taken over by a `QuantizedCache`, as if that had been there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from duotone.hf.model.masks import real_tokens

if TYPE_CHECKING:
    from duotone.hf.cache.cache import QuantizedCache


def absorb(
    cache: QuantizedCache, dense: Cache, visual_mask: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Store the tokens of `dense` in `cache`; `QuantizedCache.absorb` has arguments and errors."""
    _check(cache, dense)
    batch, _, tokens, _ = dense.layers[0].keys.shape
    device = dense.layers[0].keys.device
    real = real_tokens(attention_mask, batch, tokens, device)
    none = torch.zeros_like(real)
    visual = none if visual_mask is None else visual_mask.to(device).bool()
    cache.begin(visual, real)
    try:
        for layer, source in zip(cache.layers, dense.layers, strict=True):
            layer.is_initialized = True
            cache.take(layer, source.keys, source.values)
            cache.commit()
    finally:
        cache.end_step()


def _check(cache: QuantizedCache, dense: Cache) -> None:
    """Raise ValueError for a cache with tokens or eviction, and for layers that do not fit."""
    if cache.spec.evict is not None:
        raise ValueError(
            "absorb needs a scheme that keeps all tokens; this one evicts some by the scores "
            "of queries, which a dense cache does not hold. Run the model with this cache."
        )
    if length := cache.length:
        raise ValueError(f"absorb needs an empty cache; this one holds {length} tokens.")
    held = {getattr(layer, "keys", None) is not None and layer.keys.shape[2]
            for layer in dense.layers}  # fmt: skip
    if len(dense.layers) != len(cache.layers) or len(held) != 1 or not all(held):
        raise ValueError(
            f"expected {len(cache.layers)} layers with K and V of the same tokens; got "
            f"{len(dense.layers)} layers of {sorted(map(int, held))} tokens. "
            "Sliding-window layers forget tokens: prefill without them."
        )
