"""The part of a model that speaks: its steps fill the cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from duotone.hf.model.masks import is_one_of


def speaker_of(model: PreTrainedModel) -> PreTrainedModel:
    """The language model inside, where the model's own `generate` calls that of this part.

    BLIP-2 and Kosmos-2 encode pictures first; for any other model this is the model itself.
    """
    if getattr(type(model), "generate", GenerationMixin.generate) is GenerationMixin.generate:
        return model
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.can_generate()), model)


def handed_on(ids: tuple[int, ...], given: dict[str, Any]) -> Tensor | None:
    """[batch, tokens] True at the ids of visual tokens that a model hands on to its speaker.

    given: arguments of the speaker's `generate`, whose steps see embeddings alone. None: it has no
    embeddings, or nobody knows the ids.
    """
    tokens = given.get("input_ids")
    if not ids or tokens is None or given.get("inputs_embeds") is None:
        return None
    return is_one_of(tokens, ids)
