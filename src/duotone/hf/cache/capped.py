"""Attention with capped scores: softcap * tanh(scores / softcap) before the softmax (Gemma 2).

No kernel has the tanh, and neither has PyTorch's attention, so all of it runs by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.attention import attend
from duotone.cache import DenseSegment, Segment
from duotone.hf.model.facts import CAPPED
from duotone.hf.model.masks import as_visibility, causal_visibility
from duotone.tools.slow_paths import SlowPaths


def attend_capped(
    query: Tensor, kv: Sequence[Segment], sm_scale: float, softcap: float, slow: SlowPaths
) -> Tensor:
    """Attention of any number of queries to segments; on a GPU it says that it is slow."""
    if query.is_cuda:
        slow.say("attention", "reference", CAPPED)
    return attend(query, kv, sm_scale=sm_scale, softcap=softcap)


def dense_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sm_scale: float, softcap: float
) -> Tensor:
    """Attention to K and V [batch, kv_heads, tokens, head_dim] that no cache of ours holds.

    mask: the model's own one; without it, the last queries see themselves and the past.
    """
    queries, tokens = query.shape[2], key.shape[2]
    if mask is None:
        visible = causal_visibility(queries, tokens, query.device)
    else:
        visible = as_visibility(mask, queries)
    lengths = torch.full((len(query),), tokens, device=query.device)
    segment = DenseSegment(key, value, lengths, mask=visible.expand(len(query), -1, -1))
    return attend(query, [segment], sm_scale=sm_scale, softcap=softcap)
