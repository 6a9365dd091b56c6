"""Run a transformers model with its visual tokens first (AIFS); its outputs stay as they were.

Between two hooks on the language model, embeddings, position ids, mask, DeepStack's positions and a
quantized model's modalities are in the new order, and so are the rows of the KV cache: each turn
within itself. `order` keeps
which position every slot of the cache holds, so that masks are right in later turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.facts import ModelFacts, model_facts
from duotone.hf.masks import real_tokens, visual_tokens
from duotone.hf.quantized import quantization_of
from duotone.weights.modality import Modality
from duotone.weights.reorder import inverse, take, take_mask, take_positions, visibility
from duotone.weights.reorder import visual_first as visual_first_order

IMPLEMENTATIONS = ("eager", "sdpa")


@contextmanager
def visual_first(model: PreTrainedModel) -> Iterator[None]:
    """Within, every forward of `model` runs on reordered tokens.

    Errors: ValueError for a model without visual tokens, an attention implementation that takes no
    mask, and (at the forward) for caches that drop or preallocate slots.
    """
    facts = model_facts(model)
    _check(model, facts)
    known = quantization_of(model)
    modality = Modality() if known is None else known.modality
    hooks = _Hooks(facts, model.get_decoder().config, modality)
    handles = [
        model.register_forward_pre_hook(hooks.before_model, with_kwargs=True),
        model.get_decoder().register_forward_pre_hook(hooks.before_decoder, with_kwargs=True),
        model.get_decoder().register_forward_hook(hooks.after_decoder),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(model: PreTrainedModel, facts: ModelFacts) -> None:
    if not facts.is_multimodal:
        raise ValueError(f"{facts.model_type!r} has no visual tokens; there is nothing to reorder.")
    chosen = model.get_decoder().config._attn_implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f"reordered tokens need an attention that takes a mask: {IMPLEMENTATIONS}; got "
            f"{chosen!r}. Load the model with attn_implementation='sdpa', or use scales per row, "
            "which need no reordering."
        )


class _Hooks:
    """What is known between the hooks of one forward, and of the cache between forwards."""

    def __init__(self, facts: ModelFacts, text_config: Any, modality: Modality):
        self.facts = facts
        self.config = text_config
        self.modality = modality
        self.visual: Tensor | None = None
        self.order: Tensor | None = None
        self.slots: Tensor | None = None

    def before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Where the visual tokens of this step are."""
        ids = args[0] if args else kwargs.get("input_ids")
        embeds = kwargs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        past = _past(kwargs)
        span = slice(past, past + given.shape[1])
        self.visual = visual_tokens(self.facts, ids, embeds, None, span)

    def before_decoder(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Reorder everything that has a dimension of tokens."""
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            embeds = module.get_input_embeddings()(args[0] if args else kwargs["input_ids"])
        batch, tokens = embeds.shape[:2]
        past = self._check_cache(kwargs, batch)
        mask = kwargs.get("attention_mask")
        real = _real(mask, batch, past + tokens, embeds.device)
        self.order = visual_first_order(self.visual, real[:, past:])
        self.slots = torch.cat([self._past_slots(batch, past, embeds), self.order + past], dim=1)
        self._move_modalities(batch, tokens)
        changed = dict(kwargs, inputs_embeds=take(embeds, self.order), input_ids=None)
        changed["position_ids"] = self._positions(kwargs.get("position_ids"), past)
        changed["attention_mask"] = self._masks(mask, real, past, embeds.dtype)
        if kwargs.get("visual_pos_masks") is not None:
            changed["visual_pos_masks"] = take(kwargs["visual_pos_masks"], self.order)
        return (), changed

    def after_decoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """The last hidden state in the original order."""
        output.last_hidden_state = take(output.last_hidden_state, inverse(self.order))
        return output

    def _move_modalities(self, batch: int, tokens: int) -> None:
        """Rows of the linears: hooks on the model set them before a step and clear them after."""
        visual = self.modality.visual
        if visual is not None:
            self.modality.visual = take(visual.view(batch, tokens), self.order).flatten()

    def _past_slots(self, batch: int, past: int, embeds: Tensor) -> Tensor:
        if past == 0:
            return torch.empty(batch, 0, dtype=torch.long, device=embeds.device)
        return self.slots

    def _positions(self, given: Tensor | None, past: int) -> Tensor:
        if given is None:
            tokens = self.order.shape[1]
            given = torch.arange(past, past + tokens, device=self.order.device)[None]
        return take_positions(given, self.order)

    def _masks(self, mask: Any, real: Tensor, past: int, dtype: torch.dtype) -> Any:
        if isinstance(mask, dict):
            return {kind: self._mask(m, real, past, dtype) for kind, m in mask.items()}
        if any(kind == "sliding_attention" for kind in getattr(self.config, "layer_types", ())):
            raise ValueError(
                f"{self.facts.model_type!r} has sliding windows and makes its masks too late to "
                "be permuted. Use scales per row, which need no reordering."
            )
        return self._mask(mask, real, past, dtype)

    def _mask(self, mask: Tensor | None, real: Tensor, past: int, dtype: torch.dtype) -> Tensor:
        """[batch, 1, queries, keys] in slot order: the model's own, or causal by positions."""
        if mask is not None and mask.dim() == 4:
            return take_mask(mask, self.order, self.slots)
        kept = real.gather(1, self.slots)
        seen = visibility(self.order + past, self.slots, kept)[:, None]
        if self.config._attn_implementation == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
            ~seen, torch.finfo(dtype).min
        )

    def _check_cache(self, kwargs: dict[str, Any], batch: int) -> int:
        cache, past = kwargs.get("past_key_values"), _past(kwargs)
        if cache is not None and (cache.is_compileable or any(cache.is_sliding)):
            raise ValueError(
                f"reordered tokens need a cache that only grows; got {type(cache).__name__} with "
                "static or sliding layers. Use DynamicCache(), or scales per row."
            )
        expected = 0 if past == 0 else None if self.slots is None else self.slots.shape[1]
        if past != expected or (past and len(self.slots) != batch):
            raise ValueError(
                f"the cache holds {past} tokens of {batch} sequences, which are not those of the "
                "last step here; cropped, reordered or foreign caches cannot be continued with "
                "reordered tokens. Start with an empty cache."
            )
        return past


def _past(kwargs: dict[str, Any]) -> int:
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def _real(mask: Any, batch: int, tokens: int, device: torch.device) -> Tensor:
    """[batch, past and new tokens]; masks that a model made itself know the padding already."""
    given = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    return real_tokens(given, batch, tokens, device)
