"""Next-token agreement by teacher forcing: KL(16-bit || scheme) along the 16-bit model's answers.

Task scores move only when an answer flips; the divergence of the next-token distributions moves
with every disturbance of the cache. Both run through `generate`, one decode step at a time: the
reference records its logits, the scheme is made to write the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from duotone.inference.batch import Batch, generate, make_cache
from duotone.inference.prompts import right_padded
from duotone.tasks.metrics import Score


@dataclass
class LogitsRecorder:
    """A logits processor that keeps the logits [B, vocabulary] of every step, float32."""

    logits: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep a copy and change nothing."""
        self.logits.append(scores.clone())
        return scores


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last axis, p = softmax(reference), q = softmax(logits).

    Tokens that the reference excludes (logits of -inf) contribute 0.
    """
    log_p, log_q = reference_logits.log_softmax(-1), logits.log_softmax(-1)
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill(log_p == -torch.inf, 0.0).sum(-1)


class Forcing:
    """A logits processor that compares each step with the reference and writes its token."""

    def __init__(self, answers: torch.Tensor, reference: Sequence[torch.Tensor]):
        self.answers, self.reference = answers, reference  # [B, steps], steps x [B, vocabulary]
        self.kl: list[torch.Tensor] = []
        self.same_top: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Compare this step's logits [B, vocabulary] and allow the reference's token only."""
        step = len(self.kl)
        reference = self.reference[step]
        self.kl.append(kl_divergence(reference, scores))
        self.same_top.append(reference.argmax(-1) == scores.argmax(-1))
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(-1, self.answers[:, step, None], 0.0)


def forced_agreement(
    model: Any,
    batch: Batch,
    spec: Any,
    answers: Sequence[Sequence[int]],
    reference: Sequence[torch.Tensor],
    impl: str = "auto",
) -> np.ndarray:
    """Sums per sample [B, 3]: KL in nats, steps with the same most likely token, steps counted.

    The first token of a prompt read in one step is not counted: prefill attends in full precision.
    """
    return forced_through(model, batch, make_cache(model, spec, batch, impl), answers, reference)


def forced_through(
    model: Any,
    batch: Batch,
    cache: Any,
    answers: Sequence[Sequence[int]],
    reference: Sequence[torch.Tensor],
    watching: Sequence[Any] = (),
) -> np.ndarray:
    """Return `forced_agreement` of an empty cache. watching: more logits processors."""
    forcing = Forcing(right_padded(answers, batch.attention_mask.device)[0], reference)
    processors = [forcing, *watching]
    generate(model, batch, cache, forcing.answers.shape[1], logits_processors=processors)
    first = 0 if batch.pictures_end else 1
    lengths = torch.tensor([len(ids) for ids in answers])
    step = torch.arange(len(forcing.kl))
    counted = (step >= first) & (step < lengths[:, None])
    columns = [torch.stack(forcing.kl, 1).cpu().double(), torch.stack(forcing.same_top, 1).cpu()]
    sums = [(column * counted).sum(-1) for column in columns]
    return torch.stack([*sums, counted.sum(-1)], dim=1).double().numpy()


def forced_scores(rows: np.ndarray) -> dict[str, Score]:
    """Per-token means over all counted steps from rows [samples, 3]."""
    return {"kl": Score(rows[:, [0, 2]]), "same_top_token": Score(rows[:, [1, 2]])}
