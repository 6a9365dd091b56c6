"""Merge attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Output = Float[Tensor, "*b queries value_dim"]
Lse = Float[Tensor, "*b queries"]


def merge_partials(partials: Sequence[tuple[Output, Lse]]) -> tuple[Output, Lse]:
    """Merge (output, lse) of attention over disjoint keys into (output, lse) over their union.

    out = sum_i out_i * exp(lse_i - lse),  lse = log sum_i exp(lse_i). A part without visible keys
    has lse = -inf and weight 0; a query without any visible key gets output 0.
    """
    outputs = torch.stack([out for out, _ in partials])
    parts = torch.stack([lse for _, lse in partials])
    top = parts.amax(0)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp(parts - top)
    total = weights.sum(0)
    merged = (outputs * weights.unsqueeze(-1)).sum(0)
    merged = merged / torch.where(total > 0, total, torch.ones_like(total)).unsqueeze(-1)
    return merged, top + torch.log(total)
