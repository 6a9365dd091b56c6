"""Oracle of an evicting cache: plain attention that hides tokens, and the papers' rules.

The rules are written once more, for one sequence at a time and in plain Python.
"""

import math
from typing import Any

import torch
from torch import Tensor

from duotone import Eviction


class Oracle:
    """Plain attention that hides `kept[layer]`'s complement from all tokens behind the prompt."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.visible: dict[int, Tensor] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        tokens, index = key.shape[2], module.layer_idx
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        place = torch.arange(tokens)
        visible = (place <= place[:, None])[None, None].expand(len(query), 1, -1, -1).clone()
        if attention_mask is not None:
            visible = attention_mask.expand(len(query), -1, -1, -1).clone()
        if index in self.kept:
            prompt = self.kept[index].shape[1]
            visible[:, :, prompt:, :prompt] &= self.kept[index][:, None, None]
        scores = (query @ key.mT * scaling).masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        self.weights[index], self.visible[index] = weights, visible[:, 0]
        return (weights @ value).transpose(1, 2).contiguous(), None


def judges_of(evict: Eviction, visual: list[bool], real: list[int]) -> list[int]:
    pictures = [i for i in real if visual[i]]
    after = [i for i in real if pictures and i > pictures[-1]]
    if evict.judges == "post-visual" and after:
        return after
    return real[-max(1, math.floor(evict.window * len(real))) :]


def budgets_of(evict: Eviction, shares: list[float], tokens: int) -> list[int]:
    """Clip and hand on what was clipped, until nothing is; then round by largest remainder."""
    layers, least = len(shares), max(min(0.01, evict.keep), 1 / tokens)
    low, high = 0.0, 1e6
    for _ in range(200):
        factor = (low + high) / 2
        clipped = [min(1.0, max(least, factor * share)) for share in shares]
        low, high = (factor, high) if sum(clipped) < evict.keep * layers else (low, factor)
    exact = [share * tokens for share in clipped]
    counts = [math.floor(x + 1e-6) for x in exact]
    by_remainder = sorted(range(layers), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: round(evict.keep * layers * tokens) - sum(counts)]:
        counts[i] += 1
    return counts


def choice(evict: Eviction, scores: dict[int, float], count: int) -> set[int]:
    tokens = sorted(scores)
    sinks = tokens[: min(count, evict.sink)]
    recent = min(math.floor(evict.recent * count), count - len(sinks))
    forced = [*sinks, *(tokens[-recent:] if recent else [])]
    rest = sorted((i for i in tokens if i not in forced), key=lambda i: -scores[i])
    return set([*dict.fromkeys(forced), *rest][:count])


def expected_kept(oracle: Oracle, evict: Eviction, visual: Tensor, real: Tensor) -> list[Tensor]:
    """[batch, tokens] per layer from the attention weights that the oracle saw."""
    layers = sorted(oracle.weights)
    masks = [torch.zeros_like(real) for _ in layers]
    for b in range(len(real)):
        tokens = real[b].nonzero().flatten().tolist()
        judges = judges_of(evict, visual[b].tolist(), tokens)
        shares, scores = [], []
        for layer in layers:
            weights = oracle.weights[layer][b][:, judges]
            pairs = oracle.visible[layer][b][judges]
            above = weights >= 0.01 * weights.amax(-1, keepdim=True)
            shares.append(float((above & pairs).sum() / (len(weights) * pairs.sum())))
            ramp = [1 + (evict.newest_weight - 1) * i / max(1, len(judges) - 1)
                    for i in range(len(judges))]  # fmt: skip
            weighed = weights.mean(0) * torch.tensor(ramp)[:, None]
            scores.append({i: float(weighed[:, i].sum()) for i in tokens})
        if evict.budget == "pyramid":
            ratio = [0.9 + 0.1 * (1 + math.cos(math.pi * i / len(layers))) / 2 for i in layers]
            shares = [math.prod(ratio[:i]) ** (32 / len(layers)) for i in layers]
        for layer, count in enumerate(budgets_of(evict, shares, len(tokens))):
            kept = choice(evict, scores[layer], count)
            masks[layer][b, list(kept)] = True
            if evict.nested:
                scores[layer + 1 :] = [{i: s[i] for i in kept} for s in scores[layer + 1 :]]
    return masks
