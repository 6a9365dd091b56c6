"""Importance of a prompt's tokens: the attention of some of its queries, the judges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.cache.eviction import Importance

# Attention weights per tile, over all heads: 64 MB in float32.
LARGEST_TILE = 2**24
# VL-Cache: a weight below this part of its row's maximum counts as zero.
THRESHOLD = 0.01


def measure_importance(
    query: Float[Tensor, "batch q_heads tokens head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    weights: Float[Tensor, "batch tokens"],
    visible: Callable[[slice], Bool[Tensor, "batch queries tokens"]],
    sm_scale: float,
) -> Importance:
    """Scores and density from softmax(q K^T sm_scale), averaged over query heads.

    weights: w_i of every judge, 0 at all other queries. visible(rows): mask of the tokens that
    these queries may see. Queries before the first judge are left out; the rest come in tiles.
    scores_j = sum_i w_i mean_h A_hij. density = |{A_hij >= .01 max_j A_hij}| / |{visible ij}| over
    judges i, averaged over heads (VL-Cache's 1 - sparsity; a row's maximum always counts).
    Arithmetic is in float32, or in float64 for a float64 query.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, weights = query.to(wide), key.to(wide), weights.to(wide)
    batch, heads, tokens, dim = query.shape
    judges = weights > 0
    scores, reached, seen = weights.new_zeros(batch, tokens), 0.0, 0.0
    step = max(1, LARGEST_TILE // (batch * heads * tokens))
    first = int(judges.any(0).int().argmax())
    grouped = query.view(batch, key.shape[1], -1, tokens, dim)
    for start in range(first, tokens, step):
        rows = slice(start, min(start + step, tokens))
        counted = visible(rows) & judges[:, rows, None]
        attention = _attention(grouped[:, :, :, rows], key, counted, sm_scale)
        scores += torch.einsum("bhqn,bq->bn", attention, weights[:, rows]) / heads
        top = attention.amax(-1, keepdim=True)
        above = (attention >= THRESHOLD * top) & counted[:, None]
        reached, seen = reached + above.sum((1, 2, 3)) / heads, seen + counted.sum((1, 2))
    # A sequence without tokens has no judges; any density will do.
    return Importance(scores, torch.where(seen > 0, reached / seen, 1.0))


def _attention(
    query: Float[Tensor, "batch kv_heads group queries head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    visible: Bool[Tensor, "batch queries tokens"],
    sm_scale: float,
) -> Float[Tensor, "batch q_heads queries tokens"]:
    """Attention weights in the type of query and key; rows without visible tokens are 0."""
    scores = query @ key.transpose(-1, -2)[:, :, None] * sm_scale
    hidden = ~visible[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0).flatten(1, 2)
