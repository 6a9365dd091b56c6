"""Batches of chunks: as one step, and each alone by the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.serve.pages import Chunk, PageLayout
from duotone.serve.prepared import scratch_of
from duotone.serve.ragged import RaggedStep, Row
from duotone.serve.windows import Attention

HEADS = 2
# (tokens before, new tokens): first chunks beside short continuations, hits of whole pages, and
# chunks that begin or end inside of a page, at its end, or never leave it.
REQUESTS = [(0, 70), (95, 3), (64, 1), (31, 2), (0, 5), (33, 97), (128, 64), (200, 7)]

# As engines order them: short ones first, which decode kernels serve.
BY_LENGTH = tuple(sorted(REQUESTS, key=lambda request: request[1]))


@dataclass
class Batch:
    """Requests in one pool. dummy: those whose tokens have no slots."""

    layout: PageLayout
    gqa: int = 4
    device: str = "cpu"
    requests: tuple[tuple[int, int], ...] = tuple(REQUESTS)
    dummy: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layout, count = self.layout, len(self.requests)
        torch.manual_seed(0)
        pages = max(sum(x) for x in self.requests) // layout.tokens + 1
        numbers = torch.randperm(count * (pages + layout.rings)) + 1
        numbers = numbers.to(self.device, torch.int32).view(count, -1)
        self.blocks, self.table = numbers[:, : layout.rings], numbers[:, layout.rings :]
        shape = (numbers.numel() + 1, HEADS, layout.tokens, layout.token_bytes)
        self.pool = torch.full(shape, 255, dtype=torch.uint8, device=self.device)
        for request, (before, _) in enumerate(self.requests):
            if before:
                self._chunk(request, self.pool, self._drawn(before), 0)
        self.states = self._drawn(sum(new for _, new in self.requests))

    @property
    def rows(self) -> list[Row]:
        """Rows of the step, of which the batch's first token belongs to another request."""
        rows, first = [], 1
        for request, (before, new) in enumerate(self.requests):
            rows.append((request, first, first + new, before))
            first += new
        return rows

    def alone(self) -> tuple[Tensor, Tensor]:
        """The pool after the step and its output, request by request."""
        pool, outs = self.pool.clone(), []
        for request, first, end, before in self.rows:
            own = tuple(x[first - 1 : end - 1] for x in self.states)
            outs.append(self._chunk(request, pool, own, before, request not in self.dummy))
        return pool, torch.cat(outs)

    def together(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """The pool after the step and its output, by `RaggedStep`."""
        pool, (query, key, value) = self.pool.clone(), self.states
        slots = torch.zeros(1 + len(query), dtype=torch.long, device=self.device)
        for request, first, end, _ in self.rows:
            slots[first:end] = -1 if request in self.dummy else 9
        step = RaggedStep(self.layout, HEADS, self.gqa, self.rows, self.table, self.blocks, slots)
        opened = step.open(pool, key, value)
        step.keep(pool, opened)
        scratch = scratch_of(self.layout, HEADS, torch.device(self.device))
        scale = self.layout.head_dim**-0.5
        return pool, step.attend(pool, query, opened, scratch, scale, attention)

    def _chunk(
        self, request: int, pool: Tensor, states: tuple, before: int, stored: bool = True
    ) -> Tensor:
        given = (self.table[request], self.blocks[request], states, before, stored)
        chunk = Chunk(self.layout, pool, *given)
        chunk.open()
        chunk.keep()
        return chunk.attend(self.layout.head_dim**-0.5)

    def _drawn(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.gqa * HEADS, HEADS, HEADS)
        shapes = ((tokens, n, self.layout.head_dim) for n in heads)
        return tuple(torch.randn(x).to(self.device, self.layout.dtype) for x in shapes)
