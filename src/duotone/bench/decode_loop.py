"""Decode steps as CUDA graphs with static buffers: one for a step, one for the flush between steps.

The same loop drives a 16-bit cache and few-bit ones; on a CPU it runs the same steps eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from duotone.bench.budget import release
from duotone.bench.caches import BenchCache
from duotone.bench.language import LanguageModel

WARMUP_STEPS = 2


class DecodeLoop:
    """A batch that generates from position `start` on.

    capture() records the step at the cache's present lengths; run() replays it.
    """

    def __init__(self, model: LanguageModel, cache: BenchCache, batch: int, start: int) -> None:
        self.model, self.cache, self.start = model, cache, start
        self.tokens = torch.randint(model.shape.vocab, (batch,), device=model.device)
        self.positions = torch.full((batch,), start, device=model.device)
        self._step: Callable[[], None] = self._eager_step
        self._flush: Callable[[], None] = cache.flush

    def _eager_step(self) -> None:
        self.cache.advance()
        following = self.model.step(self.tokens, self.positions, self.cache)
        self.tokens.copy_(following)
        self.positions.add_(1)

    def jump(self, generated: int) -> None:
        """Go to the state after `generated` tokens."""
        self.cache.jump(generated)
        self.positions.fill_(self.start + generated)

    def capture(self, generated: int) -> None:
        """Warm up, then record the step (and the flush) in the state after `generated` tokens."""
        self._step, self._flush = self._eager_step, self.cache.flush
        for _ in range(WARMUP_STEPS):
            self.jump(generated)
            self._flush()
            self._step()
        self.jump(generated)
        if self.model.device.type != "cuda" or not self.cache.captures:
            return
        # The graphs may use the memory of the eager steps.
        release()
        step = torch.cuda.CUDAGraph()
        with torch.cuda.graph(step):
            self._eager_step()
        self._step = step.replay
        if self.cache.has_stream:
            flush = torch.cuda.CUDAGraph()
            with torch.cuda.graph(flush, pool=step.pool()):
                self.cache.flush()
            self._flush = flush.replay
        self.jump(generated)

    def run(self, first: int, steps: int) -> Tensor:
        """Decode `steps` tokens after `first` generated tokens; returns the last token, [batch]."""
        for step in range(first, first + steps):
            if self.cache.is_due(step):
                self._flush()
            self._step()
        return self.tokens

    def seconds_per_step(self, first: int, steps: int) -> float:
        """Time of a step, flushes included, over `steps` of them; captured at `first`."""
        self.jump(first)
        wait(self.model.device)
        began = time.perf_counter()
        self.run(first, steps)
        wait(self.model.device)
        return (time.perf_counter() - began) / steps


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
