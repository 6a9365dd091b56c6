"""Distance of a spec from 16 bit on prefilled batches, and the true bits that it takes.

The distance equals `evaluate.forcing.forced_agreement` (a test), at a fraction of its time. The
prompt is not read again. Question and answer are read in the fewest steps that give the result of
single steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from duotone import CacheSpec, KVSpec
from duotone.evaluate.forcing import kl_divergence
from duotone.inference.batch import Batch, make_cache

from .bits import BitsOf, Held, held
from .prefilled import Prefilled, read_tail

# Below this KL in nats differences are rounding of the model's own dtype (bfloat16: 2e-5 at most).
KL_FLOOR = 1e-5


@dataclass(frozen=True)
class Measured:
    """One spec on some batches. rows [samples, 3]: KL in nats, same top tokens, tokens counted."""

    rows: np.ndarray
    held: Held

    @property
    def kl(self) -> float:
        """Mean over counted tokens, in nats."""
        return float(self.rows[:, 0].sum() / max(1.0, self.rows[:, 2].sum()))

    @property
    def same_top_token(self) -> float:
        """Share of counted tokens with the same most likely token."""
        return float(self.rows[:, 1].sum() / max(1.0, self.rows[:, 2].sum()))

    def __add__(self, other: Measured) -> Measured:
        return Measured(np.concatenate([self.rows, other.rows]), self.held + other.held)


def log_kl(kl: float) -> float:
    """log10 of a divergence above the floor."""
    return float(np.log10(max(kl, 0.0) + KL_FLOOR))


def flush_steps(
    spec: CacheSpec, streamed: Sequence[int], question: int, answer: int
) -> Iterator[slice]:
    """Steps over a tail of `question` + `answer` tokens that equal the question and single steps.

    streamed: tokens of each sequence's stream after the question. A token sees in codes the tokens
    that have left the window before it,

        packed(n) = group * floor(max(0, n - sink - recent) / group)

    with n tokens in the stream. A step of several tokens is exact where packed stays the same for
    all of them in all sequences. A cache flushes after several tokens and before a single one.
    Where a flush is due after a single token, the next token is read alone. Without a quantized
    text nothing is flushed, and one step is enough. Where a cache shows tokens of one step
    otherwise than generated ones, every step after the question is a single one.
    """
    if spec.tells_phases_apart:
        if question:
            yield slice(0, question)
        yield from (slice(question + i, question + i + 1) for i in range(answer))
        return
    if not isinstance(spec.text, KVSpec):
        yield slice(0, question + answer)
        return
    if question:
        yield slice(0, question)

    def packed(place: int) -> list[int]:
        window, group = spec.sink + spec.recent, spec.flush_tokens
        return [max(0, n + place - window) // group * group for n in streamed]

    start, single = 0, question == 1
    while start < answer:
        due = single and packed(start) != packed(start - 1)
        stop = start + 1
        while not due and stop < answer and packed(stop) == packed(start):
            stop += 1
        yield slice(question + start, question + stop)
        start, single = stop, stop - start == 1


def _streamed(spec: CacheSpec, prefilled: Prefilled) -> list[int]:
    """Tokens in each sequence's stream once the prompt is read."""
    batch = prefilled.batch
    real = batch.attention_mask.bool()
    stream = real if spec.visual == "text" else real & ~batch.visual_mask
    return stream.sum(1).tolist()


def _with_answers(prefilled: Prefilled) -> Batch:
    """The batch with a visual mask that covers the answers: embedded ones do not say so."""
    mask = prefilled.batch.visual_mask
    answers = prefilled.tail_tokens - prefilled.question_tokens
    return replace(prefilled.batch, visual_mask=torch.nn.functional.pad(mask, (0, answers)))


@torch.inference_mode()
def measure(
    model: Any, prefilled: Prefilled, spec: CacheSpec, *, of: BitsOf = "visual", impl: str = "auto"
) -> Measured:
    """One spec on one batch: agreement with the 16-bit answers along them, and bytes at their end.

    Errors: ValueError where the spec does not fit the model or its numbers.
    """
    batch, read = prefilled.batch, prefilled.read
    cache = make_cache(model, spec, _with_answers(prefilled), impl)
    masks = {"visual_mask": batch.visual_mask, "attention_mask": batch.attention_mask}
    cache.absorb(prefilled.dense, **{name: mask[:, :read] for name, mask in masks.items()})
    fed = prefilled.tail_tokens - prefilled.question_tokens
    if prefilled.tail_tokens and prefilled.reference is not None:
        steps = flush_steps(spec, _streamed(spec, prefilled), prefilled.question_tokens, fed)
        logits = read_tail(model, prefilled, cache, list(steps))
        rows = forced_rows(prefilled, logits)
    else:
        rows = np.zeros((len(batch.attention_mask), 3))
    measured = Measured(rows, held(cache, batch.visual_mask, of))
    cache.detach()
    return measured


def forced_rows(prefilled: Prefilled, logits: torch.Tensor) -> np.ndarray:
    """Sums per sample [B, 3] from logits at the counted tokens."""
    reference, logits = _wide(prefilled.reference), _wide(logits)
    same = reference.argmax(-1) == logits.argmax(-1)
    columns = [kl_divergence(reference, logits), same, torch.ones_like(same)]
    values = torch.stack([column.double() for column in columns], 1).cpu()
    owner = prefilled.counted.nonzero()[:, 0].cpu()
    rows = torch.zeros(len(prefilled.counted), 3, dtype=torch.float64)
    return rows.index_add_(0, owner, values).numpy()


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits
