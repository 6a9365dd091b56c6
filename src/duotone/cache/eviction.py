"""Eviction of prompt tokens: budgets by layer, then the best-scored tokens.

VL-Cache (arXiv 2410.23317) and PyramidInfer (arXiv 2405.12532) are two settings of one rule. Where
the papers clip a layer's budget, they lose or gain memory. Here the layers' budgets always sum to
`keep` of all tokens: schemes compare at equal memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from duotone.cache.ragged import Lengths
from duotone.quant import Eviction

# VL-Cache clips every layer's share of the prompt to at least this.
LEAST_SHARE = 0.01
# PyramidInfer's released configs for 7B models: a layer keeps 0.9 or more of the one above it.
PYRAMID_DECAY, PYRAMID_LAYERS = 0.9, 32
# Halvings of the interval that holds the scale of all budgets: float64's precision.
HALVINGS = 60

Mask = Bool[Tensor, "batch tokens"]


@dataclass(frozen=True)
class Importance:
    """Scores of tokens by the judges of one layer.

    scores: attention that each token gets. density: share of the judges' attention
    weights that reach 1 % of their row's maximum, 1 - sparsity.
    """

    scores: Float[Tensor, "batch tokens"]
    density: Float[Tensor, " batch"]


def judging(evict: Eviction, visual: Mask, real: Mask) -> Mask:
    """Mask of the tokens whose attention decides; at least one per sequence that has tokens."""
    after = real.sum(-1, keepdim=True) - real.cumsum(-1)
    window = (evict.window * real.sum(-1, keepdim=True)).floor().clamp_min(1)
    latest = real & (after < window)
    if evict.judges == "recent":
        return latest
    pictures = visual & real
    # Tokens with pictures before them and none at or after them.
    follows = (pictures.cumsum(-1) == pictures.sum(-1, keepdim=True)) & ~pictures
    following = real & follows & pictures.any(-1, keepdim=True)
    return torch.where(following.any(-1, keepdim=True), following, latest)


def judge_weights(evict: Eviction, judges: Mask) -> Float[Tensor, "batch tokens"]:
    """w_i of every judge, 0 elsewhere: 1 at the oldest, `newest_weight` at the newest."""
    rank = judges.cumsum(-1) - 1
    last = (judges.sum(-1, keepdim=True) - 1).clamp_min(1)
    return (1 + (evict.newest_weight - 1) * rank / last) * judges


def evictable(evict: Eviction, visual: Mask, real: Mask) -> Mask:
    """Mask of the tokens that may be dropped."""
    return real & visual if evict.which == "visual" else real


def pyramid(depth: int) -> Float[Tensor, " {depth}"]:
    """Shares of the prompt that PyramidInfer's released code keeps in each of `depth` layers.

    Layer 0 keeps all; layer l + 1 keeps r_l of the tokens of layer l, as in the 32-layer config:

        r_l = d + (1 - d) (1 + cos(pi l / depth)) / 2

    At another depth the exponent makes the same pyramid over the relative depth. The code's configs
    for 40 and 80 layers skip layers for the same purpose.
    """
    layer = torch.arange(depth, dtype=torch.float64)
    ratio = PYRAMID_DECAY + (1 - PYRAMID_DECAY) * (1 + torch.cos(math.pi * layer / depth)) / 2
    below = torch.cat([ratio.new_ones(1), ratio[:-1]])
    return below.cumprod(0) ** (PYRAMID_LAYERS / depth)


def fixed_weights(evict: Eviction, depth: int) -> Float[Tensor, "{depth} 1"] | None:
    """Weights of the layers where no score decides them, else None."""
    if evict.budget == "sparsity":
        return None
    weights = pyramid(depth) if evict.budget == "pyramid" else pyramid(depth).new_ones(depth)
    return weights[:, None]


def layer_counts(
    evict: Eviction, weights: Float[Tensor, "layers _"], tokens: Lengths
) -> Int[Tensor, "layers batch"]:
    """Number of evictable tokens, of `tokens` ones, that stay in each layer.

    share_l = clip(c weight_l, LEAST_SHARE, 1) with the c that makes the mean share `keep`. Counts
    sum to keep * layers * tokens, rounded, and are at least 1. weights: one column per sequence,
    or one for all. With weights 1 - sparsity and c = keep * layers / sum(weights) this is the
    budget of VL-Cache before clipping.
    """
    some = tokens.clamp_min(1).double()
    least = (1 / some).clamp_min(min(LEAST_SHARE, evict.keep))
    mean = (1 / some).clamp_min(evict.keep)
    weights = weights.to(some).expand(-1, len(tokens))
    low, high = torch.zeros_like(mean), 1 / weights.amin(0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        over = torch.maximum(middle * weights, least).clamp_max(1).mean(0) > mean
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    shares = torch.maximum(high * weights, least).clamp_max(1)
    return _whole(shares * some, (mean * some * len(weights)).round().long()) * (tokens > 0)


def _whole(wanted: Float[Tensor, "layers batch"], total: Lengths) -> Int[Tensor, "layers batch"]:
    """Whole numbers next to `wanted` that sum to `total`: the largest remainders are rounded up."""
    floor = (wanted + 1e-6).floor()
    order = torch.sort(wanted - floor, dim=0, descending=True, stable=True).indices
    rank = order.argsort(0)
    return (floor + (rank < total - floor.sum(0))).long()


def kept_tokens(
    evict: Eviction, scores: Float[Tensor, "batch tokens"], may_go: Mask, counts: Lengths
) -> Mask:
    """Mask of the `counts[b]` tokens of `may_go` that stay: sinks, the latest, the best scores.

    Of equal scores the earlier token stays.
    """
    place = may_go.cumsum(-1) - 1
    after = may_go.sum(-1, keepdim=True) - 1 - place
    sink = counts.clamp_max(evict.sink)
    recent = (evict.recent * counts).floor().minimum(counts - sink)
    forced = (place < sink[:, None]) | (after < recent[:, None])
    ranked = scores.masked_fill(forced, math.inf).masked_fill(~may_go, -math.inf)
    rank = torch.sort(ranked, dim=-1, descending=True, stable=True).indices.argsort(-1)
    return may_go & (rank < counts[:, None])


class Selection:
    """Choose the tokens of one prompt that stay, layer by layer, once the budgets are known.

    weights: w_i of every judge, for the scores. Layers report in order.
    """

    def __init__(self, evict: Eviction, depth: int, visual: Mask, real: Mask) -> None:
        self.evict, self.depth = evict, depth
        self.weights = judge_weights(evict, judging(evict, visual, real))
        self._may_go = evictable(evict, visual, real)
        self._stays = real & ~self._may_go
        self._heard: list[Importance] = []
        fixed = fixed_weights(evict, depth)
        self._counts = None if fixed is None else self._share(fixed.to(real.device))

    def hear(self, found: Importance) -> list[Mask]:
        """Take the next layer's importance; returns the tokens kept by the layers now decided."""
        if not found.scores.isfinite().all():
            raise ValueError("eviction needs finite attention scores; got NaN. Check the inputs.")
        self._heard.append(found)
        if self._counts is None:
            if len(self._heard) < self.depth:
                return []
            self._counts = self._share(torch.stack([layer.density for layer in self._heard]))
            return [self._keep(layer) for layer in range(self.depth)]
        return [self._keep(len(self._heard) - 1)]

    def _share(self, weights: Float[Tensor, "layers _"]) -> Int[Tensor, "layers batch"]:
        return layer_counts(self.evict, weights, self._may_go.sum(-1))

    def _keep(self, layer: int) -> Mask:
        scores = self._heard[layer].scores
        kept = kept_tokens(self.evict, scores, self._may_go, self._counts[layer])
        if self.evict.nested:
            self._may_go = kept
        return kept | self._stays
