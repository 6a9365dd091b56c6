"""One sequence's attention in one layer: scores, weights and outputs, exact or from codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from duotone.quant import calibration_affine

States = Float[Tensor, "kv_heads tokens head_dim"]
Scores = Float[Tensor, "q_heads queries tokens"]


@dataclass(frozen=True)
class Attention:
    """Queries of one sequence with their K and V; query head h reads kv head h // group.

    visible: tokens that each query may see. visual: tokens whose scores `tau` moves.
    """

    query: Float[Tensor, "q_heads queries head_dim"]
    key: States
    value: States
    visible: Bool[Tensor, "queries tokens"]
    visual: Bool[Tensor, " tokens"]
    sm_scale: float
    tau: tuple[float, float] | None = None

    def coded(self, key: States, value: States, tau: tuple[float, float] | None) -> Attention:
        """These queries on other K and V of the same tokens, with or without calibration."""
        return replace(self, key=key, value=value, tau=tau)

    def scores(self) -> Scores:
        """q . k * sm_scale in float32, moved by `tau` if there is one; hidden tokens included."""
        kv_heads = len(self.key)
        rows = self.query.float().unflatten(0, (kv_heads, -1)).flatten(1, 2)
        scores = (rows * self.sm_scale) @ self.key.float().transpose(-1, -2)
        scores = scores.reshape(*self.query.shape[:2], -1)
        return scores if self.tau is None else self._moved(scores)

    def _moved(self, scores: Scores) -> Scores:
        """CalibQuant eq. 7: per query and head, from the range over the visual tokens."""
        if not self.visual.any():
            return scores
        low, high = scores[..., self.visual].aminmax(dim=-1, keepdim=True)
        slope, offset = calibration_affine(low, high, self.tau)
        return torch.where(self.visual, slope * scores + offset, scores)

    def weights(self, scores: Scores) -> Scores:
        """softmax over visible tokens; 0 elsewhere."""
        return scores.masked_fill(~self.visible, -torch.inf).softmax(-1)

    def output(self, weights: Scores) -> Float[Tensor, "q_heads queries head_dim"]:
        """Weighted sums of V."""
        rows = weights.unflatten(0, (len(self.value), -1)).flatten(1, 2)
        return (rows @ self.value.float()).reshape(*weights.shape[:2], -1)


@dataclass(frozen=True)
class Compared:
    """Scores of the shown tokens, exact and from codes, and the errors of attention.

    weights_mse: mean over heads, queries and the tokens that each query sees. output_error: norm of
    the outputs' difference over the exact outputs' norm.
    """

    exact: Float[Tensor, " scores"]
    scores: Float[Tensor, " scores"]
    weights_mse: float
    output_error: float


def compare(exact: Attention, coded: Attention, shown: Bool[Tensor, " tokens"]) -> Compared:
    """Compare two attentions with the same tokens in the same order."""
    first, second = exact.scores(), coded.scores()
    weights = exact.weights(first), coded.weights(second)
    outputs = exact.output(weights[0]), coded.output(weights[1])
    seen = int(exact.visible.sum()) * len(first)
    norm = float(outputs[0].norm())
    return Compared(
        first[..., shown].flatten(),
        second[..., shown].flatten(),
        float((weights[0] - weights[1]).square().sum()) / seen,
        float((outputs[0] - outputs[1]).norm()) / norm if norm else 0.0,
    )
