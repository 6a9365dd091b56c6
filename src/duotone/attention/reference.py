"""Attention over segments in plain torch: the reference of all kernels, and the CPU path.

It works from codes and scales by post-scaling (CalibQuant eq. 6), never from a dequantized copy:

    q . k_hat = (q * scale) . codes + q . zero_point
    p @ v_hat = (p @ codes) * scale + sum(p) * zero_point

with signed codes and no zero_point in symmetric groups.

Any number of queries per sequence: one while decoding, a chunk in later turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from duotone.attention.merge import merge_partials
from duotone.cache.packed import PackedTensor
from duotone.cache.ragged import valid_mask
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant import calibration_affine
from duotone.quant.autocast import without_autocast
from duotone.quant.honours import check_read
from duotone.quant.rotation import out_of_basis, query_into_basis

Rows = Float[Tensor, "batch kv_heads rows channels"]
Scores = Float[Tensor, "batch kv_heads rows tokens"]
Query = Float[Tensor, "batch q_heads queries head_dim"]
Output = Float[Tensor, "batch q_heads queries value_dim"]

# Scores of one pass, per sequence: bounds the memory of long chunks against a long past.
MAX_SCORES = 1 << 24
# Rounding to steps s adds a variance of s^2 / 12; `TensorSpec.jensen` takes half of it.
JENSEN = 24


def attend(
    query: Query,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    softcap: float | None = None,
) -> Output:
    """softmax(q K^T * sm_scale) V over all tokens of all segments, in the dtype of `query`.

    tau: calibrates the scores of visual packed segments (eq. 7), per query and query head, after
        `sm_scale`. gamma and delta are taken over all of a sequence's visual keys.
    softcap: caps the scores at softcap * tanh(scores / softcap), after `sm_scale`.
    GQA: q_heads is a multiple of kv_heads; query head h reads kv head h // (q_heads / kv_heads).
    """
    kv = [segment.canonical() for segment in kv]
    tokens = sum(segment.tokens for segment in kv)
    step = queries_of_pass(query, tokens)
    with without_autocast(query.device):
        pieces = [
            _attend_chunk(query[:, :, i : i + step], _narrow(kv, i, step), sm_scale, tau, softcap)
            for i in range(0, query.shape[2], step)
        ]
        return torch.cat(pieces, 2).to(query.dtype)


def queries_of_pass(query: Query, tokens: int) -> int:
    """Queries of each sequence whose scores one pass over `tokens` holds."""
    return max(1, MAX_SCORES // max(1, tokens * query.shape[1]))


def _narrow(kv: Sequence[Segment], start: int, step: int) -> list[tuple[Segment, Tensor | None]]:
    """Pair each segment with the rows of its mask for queries start..start + step."""
    masks = (None if s.mask is None else s.mask[:, start : start + step] for s in kv)
    return list(zip(kv, masks, strict=True))


def _attend_chunk(
    query: Query,
    kv: list[tuple[Segment, Tensor | None]],
    sm_scale: float,
    tau: tuple[float, float] | None,
    softcap: float | None,
) -> Tensor:
    batch, q_heads, queries, head_dim = query.shape
    kv_heads = _kv_heads(kv[0][0])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (query.to(wide) * sm_scale).reshape(batch, kv_heads, -1, head_dim)
    scores = [_masked_scores(rows, segment, mask, queries, softcap) for segment, mask in kv]
    if tau is not None:
        scores = _calibrate(scores, [segment for segment, _ in kv], tau)
    parts = [_partial(s, segment) for s, (segment, _) in zip(scores, kv, strict=True)]
    output, _ = merge_partials(parts)
    return output.reshape(batch, q_heads, queries, -1)


def _kv_heads(segment: Segment) -> int:
    key = segment.key
    return (key.codes if isinstance(key, PackedTensor) else key).shape[1]


def _masked_scores(
    rows: Rows, segment: Segment, mask: Tensor | None, queries: int, softcap: float | None
) -> Scores:
    key = segment.key
    if isinstance(segment, PackedSegment):
        norm = segment.key_norm
        rows = rows if norm is None else rows * norm[:, :, None].to(rows.dtype)
        scores = key_scores(rows, segment.key)
    else:
        scores = rows @ key.to(rows.dtype).transpose(-1, -2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    visible = valid_mask(segment.lengths, segment.tokens)[:, None]
    if mask is not None:
        visible = visible & mask[:, :, : segment.tokens]
    # Rows run over (query head of the group, query); the mask has queries only.
    group = rows.shape[2] // queries
    visible = visible.expand(-1, queries, -1).repeat(1, group, 1)
    return scores.masked_fill(~visible[:, None], -math.inf)


def _calibrate(
    scores: list[Tensor], kv: Sequence[Segment], tau: tuple[float, float]
) -> list[Tensor]:
    """Apply g to the scores of visual packed segments; hidden keys stay hidden."""
    chosen = [i for i, segment in enumerate(kv) if segment.visual]
    if not chosen:
        return scores
    visual = torch.cat([scores[i] for i in chosen], -1)
    hidden = visual == -math.inf
    gamma = visual.masked_fill(hidden, math.inf).amin(-1, keepdim=True)
    delta = visual.amax(-1, keepdim=True)
    none = hidden.all(-1, keepdim=True)
    slope, offset = calibration_affine(gamma.masked_fill(none, 0), delta.masked_fill(none, 0), tau)
    return [slope * s + offset if i in chosen else s for i, s in enumerate(scores)]


def _partial(scores: Scores, segment: Segment) -> tuple[Tensor, Tensor]:
    """(output, lse) of one segment."""
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / torch.where(total > 0, total, torch.ones_like(total))
    if isinstance(segment, PackedSegment) and segment.exact is None:
        output = value_sum(probabilities, segment.value)
    else:
        # Slots past a sequence's length may hold anything, NaN included: 0 * NaN is NaN.
        real = valid_mask(segment.lengths, segment.tokens)[:, None, :, None]
        output = probabilities @ segment.states("value").to(scores.dtype).masked_fill(~real, 0)
    return output, (top + torch.log(total)).squeeze(-1)


def key_scores(rows: Rows, key: PackedTensor) -> Scores:
    """Scores q . k_hat of every token, from the codes; less `jensen` where the spec has it."""
    check_read(key.spec)
    rows = query_into_basis(rows, key.spec.transform)
    if not key.per_token:
        return _scores_along_tokens(rows, key)
    if key.factor is not None:
        return _scores_of_tiles(rows, key)
    codes, scale = key.signed_codes(rows.dtype), key.full_scale.to(rows.dtype)
    scores = _scores_along_channels(rows, codes, scale, _offset(key, rows.dtype), key.spec.group)
    if not key.spec.jensen:
        return scores
    squares = _channel_groups(rows.square(), key.spec.group).sum(-1)
    return scores - squares @ scale.square().transpose(-1, -2) / JENSEN


def _scores_along_tokens(rows: Rows, key: PackedTensor) -> Scores:
    codes, scale = key.signed_codes(rows.dtype), key.full_scale.to(rows.dtype)
    zero_point = _offset(key, rows.dtype)
    slots, rows = key.blocks.to_slots(codes), rows.unsqueeze(2)
    order = key.channel_order
    if order is not None:
        # Codes and parameters are sorted by class: sort q into each block's order instead.
        index = order.unsqueeze(3).expand(*order.shape[:3], *rows.shape[3:])
        rows = rows.expand(-1, -1, order.shape[2], -1, -1).gather(-1, index)
    scaled = rows * scale.unsqueeze(3)
    scores = slots @ scaled.transpose(-1, -2)
    if zero_point is not None:
        offset = (rows * zero_point.unsqueeze(3)).sum(-1)
        scores = scores + offset.unsqueeze(3)
    scores = key.multiplied(key.blocks.to_tokens(scores))
    if key.spec.jensen:
        noise = scaled.square().sum(-1).unsqueeze(3).expand(*slots.shape[:4], -1)
        scores = scores - key.multiplied(key.multiplied(key.blocks.to_tokens(noise))) / JENSEN
    return scores.transpose(-1, -2)


def _scores_of_tiles(rows: Rows, key: PackedTensor) -> Scores:
    """Scores of keys along channels that have a factor per channel and tile."""
    scaled = rows.unsqueeze(2) * key.factor.to(rows.dtype).unsqueeze(3)
    slots = key.blocks.to_slots(key.without_factors(rows.dtype))
    scores = slots @ scaled.transpose(-1, -2)
    if key.spec.jensen:
        squares = _channel_groups(scaled.square(), key.spec.group).sum(-1)
        scale = key.blocks.to_slots(key.full_scale.to(rows.dtype))
        scores = scores - scale.square() @ squares.transpose(-1, -2) / JENSEN
    return key.blocks.to_tokens(scores).transpose(-1, -2)


def _offset(x: PackedTensor, dtype: torch.dtype) -> Tensor | None:
    offset = x.offset
    return None if offset is None else offset.to(dtype)


def _scores_along_channels(
    rows: Rows, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: int | None
) -> Scores:
    rows, codes = _channel_groups(rows, group), _channel_groups(codes, group)
    partial = torch.einsum("bhmcg,bhncg->bhcmn", rows, codes)
    scores = torch.einsum("bhcmn,bhnc->bhmn", partial, scale)
    if zero_point is None:
        return scores
    return scores + rows.sum(-1) @ zero_point.transpose(-1, -2)


def value_sum(probabilities: Scores, value: PackedTensor) -> Rows:
    """Sum p @ v_hat, from the codes. Probabilities of tokens that do not exist must be 0."""
    check_read(value.spec)
    return out_of_basis(_rotated_sum(probabilities, value), value.spec.transform)


def _rotated_sum(probabilities: Scores, value: PackedTensor) -> Rows:
    if value.factor is not None:
        if value.per_token:
            return _sum_of_tiles(probabilities, value)
        probabilities = value.multiplied(probabilities.transpose(-1, -2)).transpose(-1, -2)
    codes, scale = value.signed_codes(probabilities.dtype), value.full_scale.to(probabilities.dtype)
    zero_point = _offset(value, probabilities.dtype)
    if value.per_token:
        return _sum_along_channels(probabilities, codes, scale, zero_point, value)
    slots = value.blocks.to_slots(codes)
    weights = value.blocks.to_slots(probabilities.transpose(-1, -2))
    weights = weights * value.blocks.mask[:, None, :, :, None]
    output = (weights.transpose(-1, -2) @ slots) * scale.unsqueeze(3)
    if zero_point is not None:
        output = output + weights.sum(3).unsqueeze(-1) * zero_point.unsqueeze(3)
    order = value.channel_order
    if order is not None:
        index = order.unsqueeze(3).expand_as(output)
        output = torch.empty_like(output).scatter_(-1, index, output)
    return output.sum(2)


def _sum_of_tiles(probabilities: Scores, value: PackedTensor) -> Rows:
    """Sum over tiles of values along channels, with a factor per channel and tile."""
    slots = value.blocks.to_slots(value.without_factors(probabilities.dtype))
    weights = value.blocks.to_slots(probabilities.transpose(-1, -2))
    weights = weights * value.blocks.mask[:, None, :, :, None]
    output = weights.transpose(-1, -2) @ slots
    return (output * value.factor.to(output.dtype).unsqueeze(3)).sum(2)


def _sum_along_channels(
    probabilities: Scores,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    value: PackedTensor,
) -> Rows:
    # Parameters of tokens that do not exist are arbitrary, but finite.
    codes = _channel_groups(codes, value.spec.group)
    output = torch.einsum("bhmn,bhnc,bhncg->bhmcg", probabilities, scale, codes)
    if zero_point is not None:
        output = output + (probabilities @ zero_point).unsqueeze(-1)
    return output.flatten(-2)[..., : value.head_dim]


def _channel_groups(x: Tensor, group: int | None) -> Tensor:
    size = min(group or x.shape[-1], x.shape[-1])
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
