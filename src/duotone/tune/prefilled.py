"""Batches with their 16-bit part done once: a dense cache, 16-bit answers and distributions.

A prefilled batch holds all that any spec needs. `QuantizedCache.absorb` converts the dense cache to
the spec's; the model then reads only the question and the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from duotone.hf.model.cache_argument import CACHE
from duotone.hf.model.facts import model_facts
from duotone.inference.batch import (
    EMBEDDABLE_FAMILIES,
    Batch,
    ask_later,
    generate,
    make_cache,
    read_pictures,
    visual_tokens_of,
)
from duotone.inference.prompts import right_padded


@dataclass(frozen=True)
class Prefilled:
    """One batch of B prompts, ready for any spec.

    dense: the 16-bit cache of the first `read` tokens: pictures, where the question is asked later,
        or the whole prompt.
    tail: input after these tokens, by the name of the model's argument: [B, question + answer - 1]
        ids, or the same embedded. mask: [B, read + tail], padding of the prompt left out.
    answers: [B, answer] ids of the 16-bit answers, padded to the right. counted: [B, answer] the
        tokens that count, without the first where the prompt was read at once.
    reference: logits of the 16-bit cache at the counted tokens.
    """

    batch: Batch
    dense: Any
    read: int
    tail: dict[str, Tensor]
    mask: Int[Tensor, "batch tokens"]
    answers: Int[Tensor, "batch ids"]
    counted: Bool[Tensor, "batch answer"]
    reference: Float[Tensor, "counted vocabulary"] | None = None

    @property
    def tail_tokens(self) -> int:
        """Tokens of question and answer that the model reads."""
        return self.mask.shape[1] - self.read

    @property
    def answer_tokens(self) -> int:
        """Logits wanted, at the last so many tokens."""
        return self.counted.shape[1]

    @property
    def question_tokens(self) -> int:
        """Tokens of the tail that belong to the prompt, padding included."""
        return self.batch.attention_mask.shape[1] - self.read


def later_where_possible(batch: Batch) -> Batch:
    """Ask the question after the pictures if every prompt of the batch has pictures."""
    pictured = batch.is_embedded and bool(batch.visual_mask.any(1).all())
    return ask_later(batch) if pictured else batch


def can_prefill(model: Any, batch: Batch) -> bool:
    """True if the model reads on after a dense cache by mask and plain positions alone.

    Layers that are transformers' own, or see a part of the tokens, read their prompts themselves.
    """
    config, facts = model.config, model_facts(model, visual_mask=batch.visual_mask)
    if facts.own or any(facts.sliding) or facts.spares_prompt:
        return False
    return (
        config.model_type in EMBEDDABLE_FAMILIES or config.get_text_config(decoder=True) is config
    )


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _prefill(model: Any, batch: Batch) -> Any:
    """The 16-bit cache of the whole prompt."""
    cache = make_cache(model, None, batch)
    positions = _positions(batch.attention_mask)
    with visual_tokens_of(model, batch):
        model(
            **batch.model_inputs,
            position_ids=positions,
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=1,
        )
    return cache


def _tail(model: Any, batch: Batch, read: int, answers: Tensor) -> dict[str, Tensor]:
    """Tokens of the question after `read`, and of the answers without the last token."""
    fed = answers[:, :-1]
    if not batch.is_embedded:
        return {"input_ids": torch.cat([batch.model_inputs["input_ids"][:, read:], fed], 1)}
    question = batch.model_inputs["inputs_embeds"][:, read:]
    embedded = model.get_input_embeddings()(fed).to(question)
    return {"inputs_embeds": torch.cat([question, embedded], 1)}


@torch.inference_mode()
def prefill(model: Any, batch: Batch, max_new_tokens: int) -> Prefilled:
    """Answer a batch through the 16-bit cache, and keep all that comparisons need.

    The first token of an answer counts only if the question was asked later. A prompt read in one
    step attends in full precision, so its first answer token sees no quantized cache.
    """
    token_ids = generate(model, batch, make_cache(model, None, batch), max_new_tokens).token_ids
    answers, counted = right_padded(token_ids, batch.attention_mask.device)
    made = _read(model, batch, answers, counted if batch.pictures_end else counted[:, 1:])
    if not made.counted.any():
        return made
    cache = make_cache(model, None, batch)
    for index, layer in enumerate(made.dense.layers):
        cache.update(layer.keys, layer.values, index)
    reference = read_tail(model, made, cache, [slice(0, made.tail_tokens)])
    return replace(made, reference=reference)


@torch.inference_mode()
def follow(model: Any, batch: Batch, first: Prefilled) -> Prefilled:
    """A batch of another model along the answers of `first`, compared with its distributions.

    The model has the same tokens and other numbers, such as quantized weights. Errors: ValueError
    for a batch that is read in other steps.
    """
    if batch.pictures_end != first.batch.pictures_end or batch.visual_mask.shape != (
        first.batch.visual_mask.shape
    ):
        raise ValueError("a model that follows another one reads the same prompts in equal steps")
    made = _read(model, batch, first.answers, first.counted)
    return replace(made, reference=first.reference)


def _read(model: Any, batch: Batch, answers: Tensor, counted: Tensor) -> Prefilled:
    """The 16-bit cache of the prompts or of their pictures, and the tokens after it."""
    read = batch.pictures_end or batch.attention_mask.shape[1]
    if batch.pictures_end:
        with visual_tokens_of(model, batch):
            dense = read_pictures(model, batch).pictures_read[0]
    else:
        dense = _prefill(model, batch)
    fed = torch.ones_like(answers[:, :-1]).to(batch.attention_mask)
    mask = torch.cat([batch.attention_mask, fed], 1)
    return Prefilled(batch, dense, read, _tail(model, batch, read, answers), mask, answers, counted)


def read_tail(
    model: Any, prefilled: Prefilled, cache: Any, steps: Iterable[slice]
) -> Float[Tensor, "counted vocabulary"]:
    """Logits at the counted tokens, the tail read through `cache` in the given steps."""
    positions = _positions(prefilled.mask)
    wanted = prefilled.tail_tokens - prefilled.answer_tokens
    logits = []
    for step in steps:
        here = slice(prefilled.read + step.start, prefilled.read + step.stop)
        keep = step.stop - max(step.start, wanted)
        with visual_tokens_of(model, prefilled.batch):
            output = model(
                **{name: tensor[:, step] for name, tensor in prefilled.tail.items()},
                attention_mask=prefilled.mask[:, : here.stop],
                position_ids=positions[:, here],
                **{CACHE: cache},
                use_cache=True,
                logits_to_keep=max(keep, 1),
            ).logits
        logits += [output[:, -keep:]] if keep > 0 else []
    return _without_suppressed(model, torch.cat(logits, 1)[prefilled.counted])


def _without_suppressed(model: Any, logits: Tensor) -> Tensor:
    """The distributions that `generate` picks from: without tokens that the model never writes."""
    suppressed = model.generation_config.suppress_tokens
    if suppressed:
        logits = logits.index_fill(-1, torch.tensor(suppressed, device=logits.device), -torch.inf)
    return logits
