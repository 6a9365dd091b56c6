"""What keys of the stream are divided by (InnerQ sec. 4.3): taken once, of a sequence's prompt.

The paper computes the norm at the end of prefill and folds it into W_K and W_Q, which is wrong for
keys that carry RoPE and for batches. Here it is per sequence and kv head, of keys behind RoPE.

The prompt of a sequence is its part of the first step that brings it a token, whatever other
sequences of the batch hold by then: a row of a padded batch so has the norm that it has alone.
Later steps, which are later chunks of a prompt, turns and generated tokens, keep that norm.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.cache.ragged import Lengths, valid_mask

Norm = Float[Tensor, "batch kv_heads channels"]


def key_norm(
    key: Float[Tensor, "batch kv_heads tokens channels"], lengths: Lengths, dtype: str
) -> Norm:
    """norm_c = sqrt(max_t |key_tc|) over a sequence's first `lengths[b]` tokens.

    1 where a channel is all 0, and where a sequence has no tokens. dtype: what norms are kept in.
    """
    if not key.shape[2]:
        return key.new_ones((*key.shape[:2], key.shape[3]), dtype=getattr(torch, dtype))
    real = valid_mask(lengths, key.shape[2])[:, None, :, None]
    kept = getattr(torch, dtype)
    top = key.masked_fill(~real, 0).abs().amax(2).float().sqrt()
    top = top.clamp_max(torch.finfo(kept).max).to(kept)
    return torch.where(top > 0, top, torch.ones_like(top))


def taken_over(old: Norm | None, new: Norm, begun: Bool[Tensor, " batch"]) -> Norm:
    """The norms with `new` ones of the sequences that have `begun`; None: nobody had any."""
    old = torch.ones_like(new) if old is None else old
    return torch.where(begun[:, None, None], new, old)
