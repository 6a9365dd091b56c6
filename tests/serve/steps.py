"""Decode steps beside their plain-torch references, on a GPU and on the CPU."""

import torch
from torch import Tensor

from duotone.serve import pages as reference
from duotone.serve.decode import DecodeStep
from duotone.serve.pages import Chunk, PageLayout, append_tokens

HEADS, PAGES = 2, 12


class StepCase:
    """A step of requests of these lengths, the new token included, in pages in no order.

    Two rows more are not kept: one without a slot, one that fills up the batch. loud: times that K
    and V of the last 32 channels are as large.
    """

    def __init__(
        self,
        layout: PageLayout,
        lengths: list[int],
        gqa: int,
        device: torch.device,
        loud: float = 1.0,
    ) -> None:
        self.layout, self.lengths, self.device, self.loud = layout, lengths, device, loud
        torch.manual_seed(0)
        count = len(lengths) + 2
        numbers = torch.randperm(count * PAGES).int().view(count, -1).to(device) + 1
        self.blocks, self.pages = (
            numbers[:, : layout.rings],
            numbers[:, layout.rings :].contiguous(),
        )
        shape = (count * PAGES + 1, HEADS, layout.tokens, layout.token_bytes)
        # What no token has filled is no number.
        self.pool = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
        for request, length in enumerate(lengths):
            self._keep(request, self._states(length - 1, gqa))
        self.states = self._states(count, gqa)
        self.step = DecodeStep(layout, count + 1, device)
        slots = torch.tensor([0] * len(lengths) + [-1, -1], device=device)
        given = torch.tensor([*lengths, layout.tokens, 0], dtype=torch.int32, device=device)
        self.step.fill(given, self.pages, [self.blocks[:, :1], self.blocks[:, 1:]], slots)

    def _states(self, tokens: int, gqa: int) -> tuple[Tensor, ...]:
        shapes = [(tokens, heads, self.layout.head_dim) for heads in (gqa * HEADS, HEADS, HEADS)]
        drawn = [torch.randn(shape) for shape in shapes]
        for x in drawn[1:]:
            x[..., -32:] *= self.loud
        return tuple(x.to(self.device, self.layout.dtype) for x in drawn)

    def _keep(self, request: int, states: tuple[Tensor, ...]) -> None:
        where = (self.pool, self.pages[request], self.blocks[request])
        chunk = Chunk(self.layout, *where, states, 0)
        chunk.open()
        chunk.keep()

    def appended(self) -> tuple[Tensor, Tensor]:
        """The pool after the step: by the kernel, and by plain torch."""
        step, count = self.step.numbers, len(self.states[0])
        ours, theirs = self.pool.clone(), self.pool.clone()
        self.step.store(ours, *self.states[1:])
        where = (step.rings[:count], step.full[:count], step.position[:count])
        append_tokens(*self.states[1:], theirs, *where, self.layout)
        return ours, theirs

    def attended(self, pool: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the requests' new tokens: by the kernel, and by plain torch.

        pool: after the step.
        """
        scale, out = self.layout.head_dim**-0.5, torch.full_like(query, torch.nan)
        self.step.attend(pool, self.pages, query, scale, out)
        wanted = []
        for request, length in enumerate(self.lengths):
            own = tuple(x[request : request + 1] for x in (query, *self.states[1:]))
            where = (self.pool, self.pages[request], self.blocks[request])
            chunk = Chunk(self.layout, *where, own, length - 1)
            chunk.open()
            wanted.append(chunk.attend(scale))
        assert not out[-1].any()  # of no token
        return out[: len(wanted)], torch.cat(wanted)


def by_torch(monkeypatch) -> None:
    """Let references pack and read without kernels."""
    monkeypatch.setattr(reference, "has_kernels", lambda device: False)
