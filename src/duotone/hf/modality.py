"""Telling a quantized model's linears which rows of a step are visual tokens.

Positions come from the token ids. Who runs a model on embeddings says where they are
(`announced`): without that its pictures would be quantized with the text's scales.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.facts import visual_token_ids
from duotone.weights.modality import Modality

_WATCHED: weakref.WeakKeyDictionary[PreTrainedModel, VisualRows] = weakref.WeakKeyDictionary()


class VisualRows:
    """The hooks on one model that set its `Modality` before each step and clear it afterwards."""

    def __init__(self, model: PreTrainedModel, modality: Modality) -> None:
        self.modality = modality
        self.announced: Tensor | None = None
        self._ids = visual_token_ids(model.config)
        # Without the head where that can be: whoever wants hidden states calls `model.model`.
        root = model.base_model
        self._parameters = inspect.signature(root.forward)
        root.register_forward_pre_hook(self._before, with_kwargs=True)
        root.register_forward_hook(self._after, always_call=True)

    @classmethod
    def attach(cls, model: PreTrainedModel, modality: Modality) -> VisualRows:
        """One per model, for as long as it lives."""
        if model not in _WATCHED:
            _WATCHED[model] = cls(model, modality)
        return _WATCHED[model]

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Models call each other by keyword, and a compiler cannot trace the other case.
        given = self._parameters.bind_partial(*args, **kwargs).arguments if args else kwargs
        given = {**given, **given.get("kwargs", {})}
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        visual = None
        if ids is not None:
            visual = self._of_ids(ids)
        elif embeds is not None and embeds.shape[1] > 1 and self._ids:
            visual = self._of_embeddings(embeds, given.get("past_key_values"))
        self.modality.visual = None if visual is None else visual.flatten()

    def _after(self, *_: object) -> None:
        self.modality.visual = None

    def _of_ids(self, ids: Tensor) -> Tensor | None:
        """A decode step has text only, and its scales are known without looking."""
        if ids.shape[1] == 1 or not self._ids:
            return None
        visual = ids == self._ids[0]
        for token in self._ids[1:]:
            visual |= ids == token
        return visual

    def _of_embeddings(self, embeds: Tensor, cache: Any) -> Tensor:
        if self.announced is None:
            raise ValueError(
                "a model with static scales per modality must know its visual tokens, got "
                "inputs_embeds alone; pass input_ids, or run it inside "
                "duotone.hf.modality.announced(model, mask)"
            )
        rows, tokens = embeds.shape[:2]
        first = 0 if cache is None else int(cache.get_seq_length())
        mask = self.announced[:, first : first + tokens]
        # Beams of one prompt lie side by side; tokens behind the prompt are generated ones.
        mask = mask.repeat_interleave(rows // len(mask), 0)
        return torch.nn.functional.pad(mask, (0, tokens - mask.shape[1]))


@contextmanager
def announced(model: PreTrainedModel, mask: Tensor | None) -> Iterator[None]:
    """Inside, steps on embeddings have their visual tokens where `mask` [B, T] says.

    Does nothing for a model without modality scales.
    """
    watched = _WATCHED.get(model)
    if watched is None:
        yield
        return
    before, watched.announced = watched.announced, mask
    try:
        yield
    finally:
        watched.announced = before
