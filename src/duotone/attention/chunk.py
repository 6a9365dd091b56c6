"""Attention of a chunk of queries to a packed past: from codes, or on tokens dequantized once.

`attend` decodes all codes for each pass over `MAX_SCORES` scores. A chunk that needs several passes
runs by PyTorch's scaled_dot_product_attention instead, on K and V in the type of the queries. They
are one layer's, repeated for its query heads, and live for the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.reference import Output, Query, attend, queries_of_pass
from duotone.cache.ragged import valid_mask
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.autocast import without_autocast
from duotone.tools.slow_paths import SlowPaths

# Elements of one mask, which PyTorch may copy in the type of the query.
MAX_MASK = 1 << 28


def attend_chunk(
    query: Query,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    slow: SlowPaths | None = None,
) -> Output:
    """Attention of several queries per sequence, as `attend`, in the time of 16 bit.

    query: [batch, q_heads, queries, head_dim]. kv, sm_scale, tau: as of `attend`. Dequantized
    tokens are rounded to the type of `query`. With tau, scores of visual tokens change by query,
    and with jensen those of packed ones, so that chunks of any length run by `attend`.
    slow: receives why a long chunk runs by `attend`; or None.
    """
    tokens = sum(segment.tokens for segment in kv)
    if query.shape[2] <= queries_of_pass(query, tokens):
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    if reason := _changed_scores(kv, tau):
        if slow is not None:
            slow.say(
                "attention of a later prompt", "reference", f"{reason} changes scores by query"
            )
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    with without_autocast(query.device):
        return _on_dequantized(query, kv, sm_scale)


def _changed_scores(kv: Sequence[Segment], tau: tuple[float, float] | None) -> str | None:
    """Name of what changes scores by query; None: scores are products with decoded keys."""
    if tau is not None and any(segment.visual for segment in kv):
        return "tau"
    packed = (segment for segment in kv if isinstance(segment, PackedSegment))
    return "jensen" if any(segment.key.spec.jensen for segment in packed) else None


def _on_dequantized(query: Query, kv: Sequence[Segment], sm_scale: float) -> Output:
    real = [valid_mask(segment.lengths, segment.tokens) for segment in kv]
    key, value = _joined(kv, torch.cat(real, -1), query)
    step = max(1, MAX_MASK // max(1, len(query) * key.shape[2]))
    pieces = []
    for part, start in _pieces(query, step):
        of_segments = zip(kv, real, strict=True)
        seen = torch.cat([_visible(s, r, start, part.shape[2]) for s, r in of_segments], -1)
        out = F.scaled_dot_product_attention(part, key, value, seen[:, None], scale=sm_scale)
        pieces.append(out.masked_fill(~seen.any(-1)[:, None, :, None], 0))
    return torch.cat(pieces, 2)


def _pieces(query: Query, step: int) -> Iterator[tuple[Query, int]]:
    """(at most `step` of the queries, the first one's number)."""
    for start in range(0, query.shape[2], step):
        yield query[:, :, start : start + step], start


def _joined(kv: Sequence[Segment], real: Tensor, query: Query) -> list[Tensor]:
    """K and V of all segments, [batch, q_heads, tokens, channels], in the type of `query`.

    real: [batch, tokens], True where a sequence has a token.
    """
    both = zip(*(segment.both_states() for segment in kv), strict=True)
    joined = (torch.cat([x.to(query.dtype) for x in states], 2) for states in both)
    return [_of_query_heads(x, real, query.shape[1]) for x in joined]


def _of_query_heads(x: Tensor, real: Tensor, q_heads: int) -> Tensor:
    """Every kv head as often as query heads read it."""
    # Slots past a sequence's length may hold anything, NaN included.
    x = x.masked_fill(~real[:, None, :, None], 0)
    per_kv_head = q_heads // x.shape[1]
    return x[:, :, None].expand(-1, -1, per_kv_head, -1, -1).flatten(1, 2)


def _visible(segment: Segment, real: Tensor, start: int, queries: int) -> Tensor:
    """Mask [batch, queries, tokens] of one segment for some of the queries."""
    real = real[:, None].expand(-1, queries, -1)
    if segment.mask is None:
        return real
    return real & segment.mask[:, start : start + queries]
