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
    kv = [segment.canonical() for segment in kv]
    key, value = (_joined(kv, which, query) for which in ("key", "value"))
    step = max(1, MAX_MASK // max(1, len(query) * key.shape[2]))
    pieces = []
    for part, start in _pieces(query, step):
        seen = torch.cat([_visible(s, start, part.shape[2]) for s in kv], -1)
        out = F.scaled_dot_product_attention(part, key, value, seen[:, None], scale=sm_scale)
        pieces.append(out.masked_fill(~seen.any(-1)[:, None, :, None], 0))
    return torch.cat(pieces, 2)


def _pieces(query: Query, step: int) -> Iterator[tuple[Query, int]]:
    """(at most `step` of the queries, the first one's number)."""
    for start in range(0, query.shape[2], step):
        yield query[:, :, start : start + step], start


def _joined(kv: Sequence[Segment], which: str, query: Query) -> Tensor:
    """K or V of all segments, [batch, q_heads, tokens, channels], in the type of `query`."""
    parts = []
    for segment in kv:
        # Slots past a sequence's length may hold anything, NaN included.
        real = valid_mask(segment.lengths, segment.tokens)[:, None, :, None]
        parts.append(segment.states(which).to(query.dtype).masked_fill(~real, 0))
    joined = torch.cat(parts, 2)
    return joined.repeat_interleave(query.shape[1] // joined.shape[1], 1)


def _visible(segment: Segment, start: int, queries: int) -> Tensor:
    """Mask [batch, queries, tokens] of one segment for some of the queries."""
    real = valid_mask(segment.lengths, segment.tokens)[:, None].expand(-1, queries, -1)
    if segment.mask is None:
        return real
    return real & segment.mask[:, start : start + queries]
