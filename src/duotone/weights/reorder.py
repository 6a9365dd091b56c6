"""AIFS: visual tokens first, so that each modality's scale covers one slice of the rows.

Causality follows the original positions, whatever the order in memory (MQuant eq. 5 for one image;
this rule for any number of images, turns and left-padded batches):

    j is visible to i  <=>  pos[j] <= pos[i], and j is no padding

`order` is a permutation per row: slot s of the reordered batch holds token order[s]. Padding stays
in front of everything and belongs to no modality. Where the GEMM takes a scale per row, MSQ needs
none of this (`row_scales`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def visual_first(visual: Tensor, real: Tensor | None = None) -> Tensor:
    """order [batch, tokens] int64: padding, then visual tokens, then text, each in sequence.

    visual, real: [batch, tokens] bool; real None: no padding. Errors: ValueError for other shapes
    or types.
    """
    real = torch.ones_like(visual) if real is None else real
    if visual.dtype != torch.bool or visual.dim() != 2 or real.shape != visual.shape:
        raise ValueError(
            "visual and real must be boolean [batch, tokens]; got "
            f"{visual.dtype} {tuple(visual.shape)} and {real.dtype} {tuple(real.shape)}."
        )
    rank = torch.where(real.bool(), torch.where(visual, 1, 2), 0)
    return rank.argsort(dim=1, stable=True)


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

    They are computed on the original order; only then are they permuted.
    """
    wide = positions.expand(*positions.shape[:-2], *order.shape)
    return wide.gather(-1, order.expand_as(wide))


def visibility(queries: Tensor, keys: Tensor, real: Tensor | None = None) -> Tensor:
    """[batch, queries, keys] bool from original positions.

    queries [batch, queries], keys [batch, keys]: original positions of what the slots hold.
    real [batch, keys]: False at padding. A query at padding sees itself, so that no softmax is
    empty; nobody reads it.
    """
    later = keys[:, None] <= queries[..., None]
    if real is None:
        return later
    return (later & real[:, None]) | (keys[:, None] == queries[..., None])


def take_mask(mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """A model's own mask [batch or 1, heads, queries, keys] for reordered queries and keys.

    M[perm][:, perm]: sliding windows and bidirectional images keep what they mean.
    """
    shape = (len(queries), mask.shape[1], queries.shape[1], keys.shape[1])
    if mask.dim() != 4 or mask.shape[2:] != shape[2:]:
        raise ValueError(
            f"a mask of {shape[2]} queries and {shape[3]} keys is expected; "
            f"got {tuple(mask.shape)}."
        )
    rows = queries[:, None, :, None].expand(*shape[:3], mask.shape[3])
    columns = keys[:, None, None, :].expand(shape)
    return mask.expand(shape).gather(2, rows).gather(3, columns)


def row_scales(visual: Tensor, visual_scale: float, text_scale: float) -> Tensor:
    """MSQ without reordering: the static scale of each token [...] float32."""
    scales = torch.tensor([text_scale, visual_scale], dtype=torch.float32, device=visual.device)
    return scales[visual.long()]


def slices(visual: Tensor, real: Tensor | None = None) -> tuple[Tensor, int]:
    """All tokens of a batch as one list, visual ones first, and how many those are.

    Rows of a batch have different numbers of visual tokens; a GEMM does not care which row a token
    is from. -> (order [tokens of all rows], count); padding counts as text here.
    """
    flat = visual.flatten() if real is None else (visual & real).flatten()
    return (~flat).long().argsort(stable=True), int(flat.sum())
