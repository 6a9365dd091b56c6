"""Norm that divides keys of the stream (InnerQ sec. 4.3): taken once, from a sequence's prompt.

The paper computes the norm at the end of prefill and folds it into W_K and W_Q. That is wrong for
keys that carry RoPE, and for batches. Here the norm is per sequence and kv head, after RoPE.

The prompt of a sequence is its part of the first step that brings it a token. Other sequences of
the batch play no part: a row of a padded batch has the norm that it has alone. Later steps (later
chunks of a prompt, turns, generated tokens) keep that norm.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.cache.ragged import Lengths, valid_mask
from duotone.quant.small_floats import PARAM_TYPES

Norm = Float[Tensor, "batch kv_heads channels"]


def key_norm(
    key: Float[Tensor, "batch kv_heads tokens channels"], lengths: Lengths, dtype: str
) -> Norm:
    """norm_c = sqrt(max_t |key_tc|) over a sequence's first `lengths[b]` tokens.

    The norm is 1 where a channel is all 0, and for a sequence without tokens. dtype: type of norms;
    norms of "float8" parameters are in fp16.
    """
    if not key.shape[2]:
        return key.new_ones((*key.shape[:2], key.shape[3]), dtype=PARAM_TYPES[dtype])
    real = valid_mask(lengths, key.shape[2])[:, None, :, None]
    kept = PARAM_TYPES[dtype]
    top = key.masked_fill(~real, 0).abs().amax(2).float().sqrt()
    top = top.clamp_max(torch.finfo(kept).max).to(kept)
    return torch.where(top > 0, top, torch.ones_like(top))


def divided(key: Tensor, norm: Norm | None) -> Tensor:
    """Divide keys [batch, kv_heads, tokens, channels] by their norm, in the keys' type."""
    return key if norm is None else (key / norm[:, :, None]).to(key.dtype)


def taken_over(old: Norm | None, new: Norm, begun: Bool[Tensor, " batch"]) -> Norm:
    """Replace the norms of the sequences that have `begun`. old: None where no norm exists yet."""
    old = torch.ones_like(new) if old is None else old
    return torch.where(begun[:, None, None], new, old)
