"""AIFS: visual tokens first, so that each modality's scale covers one slice of the rows.

Causality follows the original positions in every order in memory. MQuant eq. 5 is for one image;
this rule is for any number of images, turns and left-padded batches:

    j is visible to i  <=>  pos[j] <= pos[i], and j is no padding

`order` is a permutation per row: slot s of the reordered batch holds token order[s]. Padding is no
visual token, so padding stays among the text, hidden by the mask. Where the GEMM takes a scale per
row (`Modality.row_scale`), MSQ needs no reordering.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visual_first(visual: Tensor) -> Tensor:
    """order [batch, tokens] int64: visual tokens, then all others, each in sequence.

    visual: [batch, tokens] bool. Errors: ValueError for other shapes or types.
    """
    if visual.dtype != torch.bool or visual.dim() != 2:
        raise ValueError(
            f"visual must be boolean [batch, tokens]; got {visual.dtype} {tuple(visual.shape)}."
        )
    return (~visual).int().argsort(dim=1, stable=True)


def inverse(order: Tensor) -> Tensor:
    """The permutation back: take(take(x, order), inverse(order)) is x."""
    return order.argsort(dim=1)


def take(x: Tensor, order: Tensor) -> Tensor:
    """x [batch, tokens, ...] in another order."""
    if x.shape[:2] != order.shape:
        raise ValueError(
            f"an order of {tuple(order.shape)} cannot reorder a tensor {tuple(x.shape)}."
        )
    return x[torch.arange(len(order), device=order.device)[:, None], order]


def take_positions(positions: Tensor, order: Tensor) -> Tensor:
    """Position ids [..., batch or 1, tokens] in another order: M-RoPE's [3, batch, tokens] too.

    The ids are computed on the original order; only then are the ids permuted.
    """
    wide = positions.expand(*positions.shape[:-2], *order.shape)
    return wide.gather(-1, order.expand_as(wide))


def visibility(queries: Tensor, keys: Tensor, real: Tensor | None = None) -> Tensor:
    """[batch, queries, keys] bool from original positions.

    queries [batch, queries], keys [batch, keys]: original positions of the tokens in the slots.
    real [batch, keys]: False at padding. A query at padding sees itself, so that no softmax is
    empty; its output is not read.
    """
    later = keys[:, None] <= queries[..., None]
    if real is None:
        return later
    return (later & real[:, None]) | (keys[:, None] == queries[..., None])


def take_mask(mask: Tensor, queries: Tensor, keys: Tensor | None = None) -> Tensor:
    """A model's own mask [batch or 1, heads, queries, keys] for reordered queries and keys.

    M[perm][:, perm]: sliding windows and bidirectional images keep their meaning. keys None: keys
    are not reordered.
    """
    shape = (len(queries), mask.shape[1], queries.shape[1], mask.shape[-1])
    given = (*shape[:3], shape[3] if keys is None else keys.shape[1])
    if mask.dim() != 4 or mask.shape[2:] != given[2:]:
        raise ValueError(
            f"a mask of {given[2]} queries and {given[3]} keys is expected; "
            f"got {tuple(mask.shape)}."
        )
    moved = mask.expand(shape).gather(2, queries[:, None, :, None].expand(shape))
    return moved if keys is None else moved.gather(3, keys[:, None, None, :].expand(shape))
