"""Rotations of OSCAR (arXiv 2605.17757), one per layer for K and one for V, from a model's states.

    R = U H P       K and V are multiplied from the right; columns of U are eigenvectors

of the mean over kv heads of E[q q^T] for K, and of E[w v v^T] for V with w = k^T E[q q^T] k, scaled
to mean 1. H is a Hadamard matrix. P gives the largest eigenvalues places of reversed bits. With a
range for all channels of a token P changes nothing. The released code has it, and so do we.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from duotone.hf.model.facts import ModelFacts, model_facts
from duotone.hf.model.fingerprint import fingerprint
from duotone.quant.bases import Bases
from duotone.quant.rotation import hadamard

Heads = Float[Tensor, "batch heads tokens head_dim"]
Rows = Float[Tensor, "tokens heads head_dim"]
Square = Float[Tensor, "head_dim head_dim"]


@dataclass
class States:
    """Queries, K and V of one layer, post-RoPE, of all calls so far, on the CPU."""

    query: list[Rows] = field(default_factory=list)
    key: list[Rows] = field(default_factory=list)
    value: list[Rows] = field(default_factory=list)

    def rows(self, which: str) -> Rows:
        """All tokens, in float64."""
        return torch.cat(getattr(self, which)).double()


@dataclass
class StatesRecorder:
    """Keep the states of packed layers while a model reads; for `hf.recording.recording`.

    All tokens count: give prompts without padding. Memory grows with the tokens.
    """

    facts: ModelFacts
    header: dict[str, Any]
    layers: dict[int, States] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, **header: Any) -> StatesRecorder:
        """Recorder of a model. header: the origin, JSON-safe."""
        return cls(model_facts(model), {"fingerprint": fingerprint(model), **header})

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """Add one layer of one step."""
        if module.layer_idx not in self.facts.packed:
            return
        states = self.layers.setdefault(module.layer_idx, States())
        for kept, x in ((states.query, query), (states.key, key), (states.value, value)):
            kept.append(x.detach().transpose(1, 2).flatten(0, 1).cpu())

    def bases(self) -> Bases:
        """Rotations of all layers. Errors: ValueError if nothing was read."""
        if not self.layers:
            raise ValueError("rotations need states to learn from; got none. Let the model read.")
        return rotations([self.layers[i] for i in sorted(self.layers)], self.header)


def rotations(layers: Sequence[States], header: Mapping[str, Any]) -> Bases:
    """Rotations of layers; every kv head of a layer has the same one."""
    made: dict[str, list[Tensor]] = {"key": [], "value": []}
    for states in layers:
        query, key, value = (states.rows(which) for which in ("query", "key", "value"))
        seen = query_moments(query, key.shape[1])
        turns = {"key": seen.mean(0), "value": weighted_moments(seen, key, value).mean(0)}
        for which, moment in turns.items():
            made[which].append(rotation(moment).expand(key.shape[1], -1, -1))
    stacked = (torch.stack(made[which]).float() for which in ("key", "value"))
    return Bases(*stacked, header=dict(header))


def query_moments(query: Rows, kv_heads: int) -> Float[Tensor, "kv_heads head_dim head_dim"]:
    """E[q q^T] over tokens and over the q heads of every kv head."""
    rows = query.unflatten(1, (kv_heads, -1))
    return torch.einsum("nkgd,nkge->kde", rows, rows) / (len(rows) * rows.shape[2])


def weighted_moments(
    seen: Float[Tensor, "kv_heads head_dim head_dim"], key: Rows, value: Rows
) -> Float[Tensor, "kv_heads head_dim head_dim"]:
    """E[w v v^T] of every kv head, where w is a token's mean squared score, scaled to mean 1."""
    weights = torch.einsum("nkd,kde,nke->nk", key, seen, key)
    weights = weights / weights.mean(0).clamp_min(1e-12 / len(key))
    return torch.einsum("nk,nkd,nke->kde", weights, value, value) / len(value)


def rotation(moment: Square) -> Square:
    """U H P of a second moment; H in blocks, and no P, where channels are no power of two."""
    channels = len(moment)
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    turned = vectors @ hadamard(channels).to(vectors)
    if channels & (channels - 1):
        return turned
    place = torch.empty(channels, dtype=torch.long)
    place[reversed_bits(channels)] = values.argsort(descending=True)
    return turned[:, place]


def reversed_bits(size: int) -> Int[Tensor, " {size}"]:
    """Numbers below a power of two, each with its bits in reverse order."""
    width = size.bit_length() - 1
    return torch.tensor(
        [int(f"{i:0{width}b}"[::-1] or "0", 2) if width else 0 for i in range(size)]
    )
