"""Attention of a chunk of queries to a packed past: from codes, or on tokens dequantized once.

`attend` decodes all codes for each pass over `MAX_SCORES` scores. On a GPU, and where a chunk needs
several passes, PyTorch's scaled_dot_product_attention runs instead, on K and V in the type of the
queries. They are one layer's and live for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.reference import Output, Query, attend, queries_of_pass
from duotone.attention.sdpa import in_order_for
from duotone.attention.unpack import states_of
from duotone.cache.ragged import valid_mask
from duotone.cache.segments import PackedSegment, Segment
from duotone.cache.visibility import Visibility
from duotone.quant.autocast import without_autocast
from duotone.tools.slow_paths import SlowPaths

# Elements of one mask, which PyTorch may copy in the type of the query.
MAX_MASK = 1 << 28
# Queries that are taken as rows of their kv head, so that K and V are not repeated for query heads.
FEW_QUERIES = 512
Found = TypeVar("Found")


def attend_chunk(
    query: Query,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    slow: SlowPaths | None = None,
    seen: Visibility | None = None,
) -> Output:
    """Attention of several queries per sequence, as `attend`, in the time of 16 bit.

    query: [batch, q_heads, queries, head_dim]. kv, sm_scale, tau: as of `attend`. Dequantized
    tokens are rounded to the type of `query`. With tau, scores of visual tokens change by query,
    and with jensen those of packed ones, so that chunks of any length run by `attend`.
    slow: receives why a chunk runs by `attend` that is long or on a GPU; or None. seen: keeps the
    joined masks for other layers, whose segments have these masks, too; or None.
    """
    tokens = sum(segment.tokens for segment in kv)
    if not query.is_cuda and query.shape[2] <= queries_of_pass(query, tokens):
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    if reason := _changed_scores(kv, tau):
        if slow is not None:
            slow.say(
                "attention of a later prompt", "reference", f"{reason} changes scores by query"
            )
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    with without_autocast(query.device):
        return _on_dequantized(query, kv, sm_scale, seen)


def _changed_scores(kv: Sequence[Segment], tau: tuple[float, float] | None) -> str | None:
    """Name of what changes scores by query; None: scores are products with decoded keys."""
    if tau is not None and any(segment.visual for segment in kv):
        return "tau"
    packed = (segment for segment in kv if isinstance(segment, PackedSegment))
    return "jensen" if any(segment.key.spec.jensen for segment in packed) else None


def _on_dequantized(
    query: Query, kv: Sequence[Segment], sm_scale: float, seen: Visibility | None
) -> Output:
    # Layers whose segments have these lengths and masks share what follows from them.
    once = _each_time if seen is None else seen.once
    of = [x for segment in kv for x in (segment.lengths, segment.mask)]
    key, value = _joined(kv, once(lambda: _real(kv), _real, *of), query.dtype)
    (batch, heads), queries, tokens = query.shape[:2], query.shape[2], key.shape[2]
    group, step = heads // key.shape[1], max(1, MAX_MASK // max(1, batch * tokens))
    if queries <= FEW_QUERIES and queries * group <= step:
        masks = once(lambda: _of_group(_visible(kv, slice(queries)), group), group, *of)
        rows = query.unflatten(1, (-1, group)).flatten(2, 3)
        out = _attended(rows, key, value, masks, sm_scale)
        return out.unflatten(2, (group, queries)).flatten(1, 2)
    # Copies: PyTorch's kernels read views wrongly whose heads have a stride of 0 (pytorch#191937).
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    if queries <= step:
        masks = once(lambda: _visible(kv, slice(queries)), _visible, *of)
        return _attended(query, key, value, masks, sm_scale)
    pieces = []
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        pieces.append(_attended(query[:, :, rows], key, value, _visible(kv, rows), sm_scale))
    return torch.cat(pieces, 2)


def _each_time(find: Callable[[], Found], *of: object) -> Found:
    """`Visibility.once` that remembers nothing."""
    return find()


def _real(kv: Sequence[Segment]) -> Tensor:
    """[batch, tokens], True where a sequence has a token."""
    return torch.cat([valid_mask(segment.lengths, segment.tokens) for segment in kv], -1)


def _visible(kv: Sequence[Segment], rows: slice) -> tuple[Tensor, Tensor]:
    """Mask [batch, 1, queries, tokens] for some of the queries; where these see no token at all."""
    seen = torch.cat([_visible_of(segment, rows) for segment in kv], -1)[:, None]
    return seen, ~seen.any(-1, keepdim=True)


def _visible_of(segment: Segment, rows: slice) -> Tensor:
    real = valid_mask(segment.lengths, segment.tokens)[:, None]
    real = real.expand(-1, rows.stop - (rows.start or 0), -1)
    return real if segment.mask is None else real & segment.mask[:, rows]


def _of_group(masks: tuple[Tensor, Tensor], group: int) -> tuple[Tensor, Tensor]:
    """`_visible`, with the queries of all heads of a kv head as rows, a head after the other."""
    seen, blind = (x.repeat(1, 1, group, 1) for x in masks)
    return seen, blind


def _attended(
    query: Query, key: Tensor, value: Tensor, masks: tuple[Tensor, Tensor], sm_scale: float
) -> Output:
    seen, blind = masks
    with in_order_for(query, key.shape[2], masked=True):
        out = F.scaled_dot_product_attention(query, key, value, seen, scale=sm_scale)
    return out.masked_fill(blind, 0)


def _joined(kv: Sequence[Segment], real: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """K and V of all segments, [batch, kv_heads, tokens, channels].

    real: [batch, tokens], True where a sequence has a token.
    """
    both = zip(*(states_of(segment) for segment in kv), strict=True)
    joined = (torch.cat([x.to(dtype) for x in states], 2) for states in both)
    # Slots past a sequence's length may hold anything, NaN included.
    return [x.masked_fill(~real[:, None, :, None], 0) for x in joined]
