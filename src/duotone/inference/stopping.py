"""Stopping criteria for `generate`: a clock that stops nothing, and texts that end an answer."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

# Tokens at the end of an answer that are searched for a stop text after every step.
TAIL_TOKENS = 16


class StepClock:
    """A stopping criterion that never stops and notes the time of each token."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time; stop nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times_s.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def ms_per_token(self) -> float | None:
        """Median time between tokens, prefill left out; None with fewer than two tokens."""
        gaps = [1e3 * (b - a) for a, b in zip(self.times_s, self.times_s[1:], strict=False)]
        return sorted(gaps)[len(gaps) // 2] if gaps else None


class StopTexts:
    """A criterion that ends an answer once one of `stops` is among its last tokens.

    decode: token ids of several answers -> their texts. prompt_tokens: where answers begin.
    lengths: {row: tokens of its answer}, of the rows that a stop text has ended.
    """

    def __init__(
        self,
        stops: Sequence[str],
        decode: Callable[[list[list[int]]], list[str]],
        prompt_tokens: int,
    ):
        self.stops, self.decode, self.prompt_tokens = stops, decode, prompt_tokens
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """[B] booleans: which answers are over, by the ids [B, tokens] so far."""
        answers = input_ids[:, self.prompt_tokens :]
        for row, text in enumerate(self.decode(answers[:, -TAIL_TOKENS:].tolist())):
            if any(stop in text for stop in self.stops):
                self.lengths.setdefault(row, answers.shape[1])
        over = [row in self.lengths for row in range(len(answers))]
        return torch.tensor(over, device=input_ids.device)

    def trim(self, token_ids: Sequence[list[int]]) -> list[list[int]]:
        """Answers without the tokens that were padded after their stop."""
        return [ids[: self.lengths.get(row)] for row, ids in enumerate(token_ids)]
