"""Queries of answers, which read the cache after its pictures are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from duotone.calibrate.moments import Recorder
from duotone.calibrate.places import Places

Heads = Float[Tensor, "batch heads tokens head_dim"]


@dataclass
class LayerQueries:
    """One layer's queries of one batch, in the model's order.

    places: [queries] logical index of each, padding of the prompt included. counted: which of a
    sequence's queries belong to its own question and answer.
    """

    sm_scale: float
    queries: list[Heads] = field(default_factory=list)
    places: list[Int[Tensor, " queries"]] = field(default_factory=list)
    counted: list[Bool[Tensor, "batch queries"]] = field(default_factory=list)
    length: int = 0

    def add(self, query: Heads, counted: Bool[Tensor, "batch tokens"]) -> None:
        """Keep the queries that count for some sequence."""
        columns = counted.any(0).nonzero()[:, 0]
        self.queries.append(query[:, :, columns])
        self.places.append(columns + self.length)
        self.counted.append(counted[:, columns])
        self.length += query.shape[2]

    def of_sequence(
        self, row: int
    ) -> tuple[Float[Tensor, "q_heads queries head_dim"], Int[Tensor, " queries"]]:
        """(queries that count, their places) of one sequence."""
        counted = torch.cat([part[row] for part in self.counted])
        queries = torch.cat([part[row] for part in self.queries], 1)
        return queries[:, counted], torch.cat(self.places)[counted]


@dataclass
class QueryRecorder(Recorder):
    """Moments, and the queries after the pictures; for a text's prompt, only the last token's.

    These queries see all tokens that a cache packs when the prompt is read.
    """

    kept: dict[int, LayerQueries] = field(default_factory=dict)

    def begin(self, places: Places) -> None:
        """Begin a new batch; drop the queries of the previous batch."""
        self.kept = {}
        super().begin(places)

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """Record one layer of one step."""
        index, is_prompt = module.layer_idx, module.layer_idx not in self.read
        super().record(module, query, key, value, scaling)
        where = self._of_prompt(query) if is_prompt else self.counted(index, query)
        made = LayerQueries(self.layers[index].sm_scale)
        self.kept.setdefault(index, made).add(query, where)

    def _of_prompt(self, query: Heads) -> Bool[Tensor, "batch tokens"]:
        where = self.places.queries.to(query.device)
        if self.facts.is_multimodal:
            return where
        last = torch.arange(where.shape[1], device=where.device) == where.shape[1] - 1
        return where & last  # prompts are padded on the left
