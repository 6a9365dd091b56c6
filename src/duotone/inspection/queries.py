"""Queries of answers: what reads the cache once its pictures are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from duotone.calibrate.moments import AnswerListener, Places, softmax_scale

Heads = Float[Tensor, "batch heads tokens head_dim"]


@dataclass
class LayerQueries:
    """One layer's queries of one batch, in the order in which the model made them.

    places: [queries] logical index of each, padding of the prompt included. counted: which of a
    sequence's queries belong to its own question and answer.
    """

    sm_scale: float
    queries: list[Heads] = field(default_factory=list)
    places: list[Int[Tensor, " queries"]] = field(default_factory=list)
    counted: list[Bool[Tensor, "batch queries"]] = field(default_factory=list)
    length: int = 0

    def add(self, query: Heads, counted: Bool[Tensor, "batch tokens"]) -> None:
        """Keep those that count for some sequence."""
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
class QueryRecorder(AnswerListener):
    """The queries behind the pictures; of a text model's prompt that of the last token only.

    All of them see all tokens that a cache has packed when the prompt was read.
    """

    layers: dict[int, LayerQueries] = field(default_factory=dict)

    def begin(self, places: Places) -> None:
        """Of a new batch; the one before is forgotten."""
        self.layers = {}
        if not self.facts.is_multimodal:
            last = torch.zeros_like(places.queries)
            last[:, -1] = True  # prompts are padded on the left
            places = Places(places.spans, last)
        super().begin(places)

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """The queries of one layer and step; K and V are the cache's to keep."""
        index = module.layer_idx
        made = LayerQueries(softmax_scale(self.facts, scaling))
        self.layers.setdefault(index, made).add(query, self.counted(index, query))
