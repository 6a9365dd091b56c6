"""Distance of a spec from 16 bit on prefilled batches, and the true bits that it takes.

The distance equals `evaluate.forcing.forced_agreement` (a test), at a fraction of its time. The
prompt is not read again. Question and answer are read in the fewest steps that give the result of
single steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from duotone import CacheSpec
from duotone.evaluate.forcing import kl_divergence
from duotone.evaluate.steps import flush_steps
from duotone.inference.batch import Batch, make_cache

from .answered import Answered, forced_along
from .bits import BitsOf, Held, held
from .packed import Packed, Watch
from .prefilled import Prefilled, read_tail

Ready = Prefilled | Answered

# Below this KL in nats differences are rounding of the model's own dtype (bfloat16: 2e-5 at most).
KL_FLOOR = 1e-5


@dataclass(frozen=True)
class Measured:
    """One spec on some batches. rows [samples, 3]: KL in nats, same top tokens, tokens counted.

    packed: tokens whose codes a counted token has seen.
    """

    rows: np.ndarray
    held: Held
    packed: Packed = field(default_factory=Packed)

    @property
    def kl(self) -> float:
        """Mean over counted tokens, in nats."""
        return float(self.rows[:, 0].sum() / max(1.0, self.rows[:, 2].sum()))

    @property
    def same_top_token(self) -> float:
        """Share of counted tokens with the same most likely token."""
        return float(self.rows[:, 1].sum() / max(1.0, self.rows[:, 2].sum()))

    def __add__(self, other: Measured) -> Measured:
        rows = np.concatenate([self.rows, other.rows])
        return Measured(rows, self.held + other.held, self.packed + other.packed)


def log_kl(kl: float) -> float:
    """log10 of a divergence above the floor."""
    return float(np.log10(max(kl, 0.0) + KL_FLOOR))


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
def measure(model: Any, ready: Ready, spec: CacheSpec, *, of: BitsOf = "visual") -> Measured:
    """One spec on one batch: agreement with the 16-bit answers along them, and bytes at their end.

    Errors: ValueError where the spec does not fit the model or its numbers.
    """
    through = _token_by_token if isinstance(ready, Answered) else _from_prefill
    cache, rows, packed = through(model, ready, spec)
    measured = Measured(rows, held(cache, ready.batch.visual_mask, of), packed)
    cache.detach()
    return measured


def _token_by_token(
    model: Any, answered: Answered, spec: CacheSpec
) -> tuple[Any, np.ndarray, Packed]:
    """(the cache at the end, rows, packed tokens) from the prompt on."""
    cache = make_cache(model, spec, answered.batch)
    return cache, *forced_along(model, answered, cache)


def _from_prefill(
    model: Any, prefilled: Prefilled, spec: CacheSpec
) -> tuple[Any, np.ndarray, Packed]:
    """(the cache at the end, rows, packed tokens) from the 16-bit cache on."""
    batch, read = prefilled.batch, prefilled.read
    cache = make_cache(model, spec, _with_answers(prefilled))
    masks = {"visual_mask": batch.visual_mask, "attention_mask": batch.attention_mask}
    cache.absorb(prefilled.dense, **{name: mask[:, :read] for name, mask in masks.items()})
    watch = Watch(cache)
    if not prefilled.tail_tokens or prefilled.reference is None:
        return cache, np.zeros((len(batch.attention_mask), 3)), watch.packed
    prompt, streamed = prefilled.question_tokens, _streamed(spec, prefilled)
    steps = flush_steps(spec, prefilled.tail_tokens, prompt=prompt, streamed=streamed)
    logits = read_tail(model, prefilled, cache, watch.before(steps))
    return cache, forced_rows(prefilled, logits), watch.packed


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
