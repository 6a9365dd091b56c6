"""Caches that hold one sequence as the model has read it, and batches of its copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache


def static_copies(model: Any, dense: Any, batch: int, tokens: int) -> StaticCache:
    """transformers' static cache of `batch` copies of a sequence, with room for `tokens`.

    dense: a DynamicCache of one sequence.
    """
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)
    for index, layer in enumerate(dense.layers):
        key, value = (_copies(x, batch) for x in (layer.keys, layer.values))
        # Older versions ask for the places; newer ones count the tokens.
        places = torch.arange(key.shape[2], device=key.device)
        cache.update(key, value, index, {"cache_position": places})
    return cache


def _copies(x: Tensor, batch: int) -> Tensor:
    return x.expand(batch, *x.shape[1:])
