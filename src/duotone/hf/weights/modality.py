"""Telling a quantized model's linears which rows of a step are visual tokens.

Positions come from the token ids. Who runs a model on embeddings says where they are
(`announced`): without that its pictures would be quantized with the text's scales.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.cache_argument import given_cache
from duotone.hf.model.facts import visual_token_ids
from duotone.hf.weights.turns import Turns
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.outside_graphs import outside_graphs

# An attribute of the model, so that a deep copy of it has its own.
ATTRIBUTE = "duotone_visual_rows"
# What pictures come in, beside their tokens.
PICTURES = ("pixel_values", "pixel_values_videos", "image_hidden_states", "mm_encoder_outputs")


class VisualRows:
    """The hooks on one model that set its `Modality` before each step and clear it afterwards.

    Threads that run the model wait for each other.
    """

    def __init__(self, model: PreTrainedModel, modality: Modality) -> None:
        self.modality = modality
        self.announced: Tensor | None = None
        self._turns = Turns()
        self._ids = visual_token_ids(model.config)
        # Without the head where that can be: whoever wants hidden states calls `model.model`.
        root = model.base_model
        self._parameters = inspect.signature(root.forward)
        self._hooks = (
            root.register_forward_pre_hook(self._before, with_kwargs=True),
            root.register_forward_hook(self._after, always_call=True),
        )

    @classmethod
    def of(cls, model: nn.Module) -> VisualRows | None:
        """A model's, if it has one."""
        return getattr(model, ATTRIBUTE, None)

    @classmethod
    def attach(cls, model: PreTrainedModel, modality: Modality) -> VisualRows:
        """One per model, until `detach`."""
        if cls.of(model) is None:
            setattr(model, ATTRIBUTE, cls(model, modality))
        return cls.of(model)

    def detach(self, model: PreTrainedModel) -> None:
        """Leave the model as it was."""
        delattr(model, ATTRIBUTE)
        for hook in self._hooks:
            hook.remove()

    @outside_graphs
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turns.begin(model)
        given = self._parameters.bind_partial(*args, **kwargs).arguments if args else kwargs
        given = {**given, **given.get("kwargs", {})}
        self.modality.set(self._visual(given) if self._ids else None)

    @outside_graphs
    def _after(self, *_: object) -> None:
        if self._turns.is_mine:  # else a hook before ours raised
            self.modality.set(None)
            self._turns.end()

    def _visual(self, given: Mapping[str, Any]) -> Tensor | None:
        """[B, T], or None for text; nothing here asks the device."""
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        if ids is not None:
            return self._of_ids(ids) if ids.shape[1] > 1 or _brings_pictures(given) else None
        cache = given_cache(given)
        if embeds is None or (embeds.shape[1] == 1 and not self._is_known(cache)):
            return None
        return self._of_embeddings(embeds, cache)

    def _of_ids(self, ids: Tensor) -> Tensor:
        visual = ids == self._ids[0]
        for token in self._ids[1:]:
            visual |= ids == token
        return visual

    def _is_known(self, cache: Any) -> bool:
        """True if one embedding's position is known: fixed-size caches have it on the device."""
        return self.announced is not None and not getattr(cache, "is_compileable", False)

    def _of_embeddings(self, embeds: Tensor, cache: Any) -> Tensor:
        if self.announced is None:
            raise ValueError(
                "a model with static scales per modality must know its visual tokens, got "
                "inputs_embeds alone; pass input_ids, or run it inside "
                "duotone.hf.weights.modality.announced(model, mask)"
            )
        rows, tokens = embeds.shape[:2]
        first = 0 if cache is None else int(cache.get_seq_length())
        mask = self.announced[:, first : first + tokens]
        # Beams of one prompt lie side by side; tokens after the prompt are generated ones.
        mask = mask.repeat_interleave(rows // len(mask), 0)
        return torch.nn.functional.pad(mask, (0, tokens - mask.shape[1]))


def _brings_pictures(given: Mapping[str, Any]) -> bool:
    """True if a single token can be visual: a placeholder that the model wrote has no picture."""
    return any(given.get(name) is not None for name in PICTURES)


@contextmanager
def announced(model: PreTrainedModel, mask: Tensor | None) -> Iterator[None]:
    """Inside, steps on embeddings have their visual tokens where `mask` [B, T] says.

    Does nothing for a model that need not know: without modality scales, not reordered.
    """
    watched = VisualRows.of(model)
    if watched is None:
        yield
        return
    before, watched.announced = watched.announced, mask
    try:
        yield
    finally:
        watched.announced = before
