"""Factors of the axis that scales do not run along: x = factors * (codes * scale + zero_point).

Groups along tokens have a scale per channel; one large token then widens all of them. A factor per
token takes its size out first. Along channels the roles are exchanged.

    "norm"      a token's L2 norm over all channels of all kv heads (OScaR, arXiv 2605.19660)
    "balanced"  tokens and channels of a tile get equal deviations, by turns (KVarN, 2606.03458)
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.quant.small_floats import PARAM_TYPES
from duotone.quant.tensor_spec import TensorSpec

NORM, BALANCED = "norm", "balanced"
# KVarN's released code: rounds, bounds of a deviation, and of the logarithm of a factor.
ROUNDS = 16
DEVIATIONS = (1e-3, 1e3)
LOGARITHMS = (-0.3, 10.0)
SMALLEST_NORM = 1e-4
Tile = Float[Tensor, "*b tokens channels"]


def divided_by_norm(
    x: Float[Tensor, "batch heads tokens channels"], spec: TensorSpec
) -> tuple[Float[Tensor, "batch heads tokens channels"], Float[Tensor, "batch 1 tokens 1"]]:
    """(x / norm, norm of each token over heads and channels), norms in param_dtype, >= 1e-4."""
    norms = x.square().sum((1, 3), keepdim=True).sqrt().clamp_min(SMALLEST_NORM)
    norms = norms.to(PARAM_TYPES[spec.param_dtype])
    return x / norms.to(x.dtype), norms


def divided_blocks(
    x: Tile, mask: Bool[Tensor, "*b tokens"], spec: TensorSpec
) -> tuple[Tile, Float[Tensor, "*b rows"]]:
    """(x / factors, factors of the tiles x), per token along tokens, else per channel.

    Rounds divide a tile by deviations, in the released order: K's tokens before its channels, V's
    channels before its tokens. The best round counts: least (largest / smallest deviation), summed
    over both axes. The factors of the first axis are kept. Those of the second would change
    nothing, since each of its rows has a scale of its own. Deviations are unbiased; padding enters
    none.
    """
    first = -1 if spec.along == "tokens" else -2
    factors = _Balancing(x, mask.unsqueeze(-1).expand_as(x), first).run()
    factors = factors.to(PARAM_TYPES[spec.param_dtype])
    return x / factors.to(x.dtype), factors.squeeze(first)


class _Balancing:
    """Rounds over tiles. first: axis whose deviations are taken first."""

    def __init__(self, x: Tile, mask: Bool[Tensor, "*b tokens channels"], first: int) -> None:
        self.x, self.mask, self.axes = x, mask, (first, -3 - first)

    def run(self) -> Tensor:
        """Factors of the best round; the first axis has size 1."""
        logs = [torch.zeros_like(self._deviation(self.x, axis)) for axis in self.axes]
        current, best = self.x, logs[0].exp()
        least = self._imbalance(current)
        for _ in range(ROUNDS):
            for i, axis in enumerate(self.axes):
                step = self._deviation(current, axis).clamp(*DEVIATIONS).log()
                logs[i] = (logs[i] + step).clamp(*LOGARITHMS)
                current = self.x / logs[0].exp() / logs[1].exp()
            imbalance = self._imbalance(current)
            better = imbalance <= least
            best = torch.where(better, logs[0].exp(), best)
            least = torch.where(better, imbalance, least)
        return best

    def _deviation(self, x: Tensor, axis: int) -> Tensor:
        count = self.mask.sum(axis, keepdim=True)
        mean = (x * self.mask).sum(axis, keepdim=True) / count.clamp_min(1)
        squares = ((x - mean) * self.mask).square().sum(axis, keepdim=True)
        return (squares / (count - 1).clamp_min(1)).sqrt()

    def _imbalance(self, x: Tensor) -> Tensor:
        """Largest over smallest deviation of both axes, [*b, 1, 1]."""
        return sum(self._spread(self._deviation(x, axis), axis) for axis in self.axes)

    def _spread(self, deviation: Tensor, axis: int) -> Tensor:
        present = self.mask.any(axis, keepdim=True)
        top = deviation.masked_fill(~present, 0).amax((-1, -2), keepdim=True)
        low = deviation.masked_fill(~present, float("inf")).amin((-1, -2), keepdim=True)
        return top / low.clamp_min(1e-8)
