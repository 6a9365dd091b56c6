"""Run a transformers model with its visual tokens first (AIFS); its outputs stay as they were.

Between two hooks on the language model everything per token is in the new order: embeddings,
position ids, DeepStack's places, modalities, queries, rows of masks. Only K and V go into the cache
and to attention as the prompt has them, which costs a copy of them per layer and step: caches of
any kind, later turns, beams and cropping know nothing of an order within a step. Steps of one token
and steps without pictures have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from duotone.hf.model.cache_argument import CACHE, NAMES, given_cache
from duotone.hf.model.facts import ModelFacts, model_facts
from duotone.hf.model.masks import real_tokens
from duotone.hf.weights.modality import VisualRows
from duotone.weights.equivalences.reorder import (
    inverse,
    take,
    take_mask,
    take_positions,
    visibility,
)
from duotone.weights.equivalences.reorder import visual_first as visual_first_order
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.outside_graphs import outside_graphs

IMPLEMENTATIONS = ("eager", "sdpa", "duotone")
REMEDY = "take scales per row (recipes without aifs), which need no reordering"
# An attribute of the model, so that a deep copy of it has its own.
ATTRIBUTE = "duotone_reordering"


@contextmanager
def visual_first(model: PreTrainedModel) -> Iterator[None]:
    """Within, every forward of `model` runs on reordered tokens; nothing new if it always does.

    Models on `inputs_embeds` get their visual tokens by `duotone.hf.weights.modality.announced`.
    Errors: ValueError for a model without visual tokens or with layers that keep a state, for an
    attention implementation that takes no mask, and (at the forward) for sliding windows whose
    masks the model makes too late.
    """
    _check_model(model, model_facts(model))
    if hasattr(model, ATTRIBUTE):
        yield
        return
    known = VisualRows.of(model)
    rows = known or VisualRows.attach(model, Modality())
    reordering = _attached(model, rows)
    try:
        yield
    finally:
        reordering.remove(model)
        if known is None:
            rows.detach(model)


def reorder_always(model: PreTrainedModel) -> None:
    """From now on a model with `VisualRows` runs on reordered tokens.

    Errors: as `check_reorderable`.
    """
    check_reorderable(model)
    if not hasattr(model, ATTRIBUTE):
        _attached(model, VisualRows.of(model))


def _attached(model: PreTrainedModel, rows: VisualRows) -> Reordering:
    made = Reordering(model, rows.modality)
    setattr(model, ATTRIBUTE, made)
    return made


def check_reorderable(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that cannot run reordered whatever it is given."""
    facts = model_facts(model)
    _check_model(model, facts)
    if facts.has_windows or facts.readers:
        raise _sliding(facts.model_type)


def _check_model(model: PreTrainedModel, facts: ModelFacts) -> None:
    if not facts.is_multimodal:
        raise ValueError(
            f"{facts.model_type!r} has no visual tokens; there is nothing to reorder. To quantize "
            f"it, {REMEDY}."
        )
    if facts.states:
        raise ValueError(
            f"{facts.model_type!r} has layers whose state follows from the order of tokens; "
            f"{REMEDY}."
        )
    if model.get_decoder() is model.base_model:
        # Pictures join inside the decoder: there is no step between them to reorder at.
        raise ValueError(
            f"{facts.model_type!r} has no decoder apart from the module that takes its pictures; "
            f"{REMEDY}."
        )
    _check_attention(model.get_decoder().config)


def _check_attention(text_config: Any) -> None:
    chosen = text_config._attn_implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f"reordered tokens need an attention that takes a mask: {IMPLEMENTATIONS}; got "
            f"{chosen!r}. Load the model with attn_implementation='sdpa', or {REMEDY}."
        )


def _sliding(model_type: str) -> ValueError:
    return ValueError(
        f"{model_type!r} has sliding windows, or layers that read K and V of others, and makes its "
        f"masks too late to be permuted; {REMEDY}."
    )


class Reordering:
    """The hooks on one model, and what is known between those of one step."""

    def __init__(self, model: PreTrainedModel, modality: Modality) -> None:
        decoder = model.get_decoder()
        self.model_type, self.config = model.config.model_type, decoder.config
        self.modality = modality
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._order: Tensor | None = None
        self._cache: Cache | None = None
        self._hooks = (
            model.base_model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            # Also after a forward pass that raised.
            decoder.register_forward_hook(self._after_decoder, always_call=True),
        )

    def remove(self, model: PreTrainedModel) -> None:
        """Leave the model as it was."""
        delattr(model, ATTRIBUTE)
        for hook in self._hooks:
            hook.remove()

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse what cannot be done before the vision tower has worked."""
        _check_attention(self.config)
        weights = kwargs.get("output_attentions")
        if self.config.output_attentions if weights is None else weights:
            raise ValueError(
                "attention weights of reordered tokens would be in another order, got "
                f"output_attentions=True; leave it out, or {REMEDY}."
            )

    def _before_decoder(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        self._forget()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        batch, tokens = (ids if embeds is None else embeds).shape[:2]
        if tokens == 1 or self.modality.visual is None:
            return None
        return self._reordered(module, given, self.modality.visual.view(batch, tokens))

    @outside_graphs
    def _reordered(
        self, decoder: nn.Module, given: dict[str, Any], visual: Tensor
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Inputs of the decoder, each with a dimension of tokens in the new order."""
        count = int(visual.sum())
        if count == 0:
            return None
        self._order = order = visual_first_order(visual)
        # More sequences than one are not two slices: their rows pick their scales.
        self.modality.set(take(visual, order), count if len(visual) == 1 else None)
        embeds = given.get("inputs_embeds")
        if embeds is None:
            embeds = decoder.get_input_embeddings()(given["input_ids"])
        cache = self._cache_of(given)
        past = 0 if cache is None else int(cache.get_seq_length())
        changed = {
            "input_ids": None,
            "inputs_embeds": take(embeds, order),
            "position_ids": self._positions(given.get("position_ids"), past),
            "attention_mask": self._masks(given.get("attention_mask"), cache, past, embeds),
            CACHE: cache,
        }
        if given.get("visual_pos_masks") is not None:
            changed["visual_pos_masks"] = take(given["visual_pos_masks"], order)
        if cache is not None:
            self._lend(cache)
        kept = {name: value for name, value in given.items() if name not in NAMES}
        return (), kept | changed

    def _cache_of(self, given: dict[str, Any]) -> Cache | None:
        """The cache, which a model that is given none makes too late."""
        cache, wanted = given_cache(given), given.get("use_cache")
        wanted = getattr(self.config, "use_cache", False) if wanted is None else wanted
        return DynamicCache(config=self.config) if cache is None and wanted else cache

    def _lend(self, cache: Cache) -> None:
        """In this step, `cache` takes and gives K and V in the order of the prompt."""
        plain, back = cache.update, inverse(self._order)

        def update(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            return plain(_moved(key, back), _moved(value, back), *args, **kwargs)

        self._cache, cache.update = cache, update
        if hasattr(cache, "order_queries"):
            cache.order_queries(self._order)

    def _forget(self) -> None:
        cache, self._cache, self._order = self._cache, None, None
        if cache is not None:
            del cache.update

    def _after_decoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Hidden states in the order of the prompt."""
        order = self._order
        self._forget()
        if order is None:
            return None
        back = inverse(order)
        self.modality.set(take(self.modality.visual.view(order.shape), back))
        if output is None:
            return None
        output.last_hidden_state = take(output.last_hidden_state, back)
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(take(x, back) for x in output.hidden_states)
        return output

    def _positions(self, given: Tensor | None, past: int) -> Tensor:
        if given is None:
            tokens = self._order.shape[1]
            given = torch.arange(past, past + tokens, device=self._order.device)[None]
        return take_positions(given, self._order)

    def _masks(self, mask: Any, cache: Cache | None, past: int, embeds: Tensor) -> Any:
        kinds = getattr(self.config, "layer_types", None) or ()
        if isinstance(mask, dict):
            layers = {kind: kinds.index(kind) if kind in kinds else 0 for kind in mask}
            return {k: self._mask(m, cache, past, embeds, layers[k]) for k, m in mask.items()}
        if "sliding_attention" in kinds and (mask is None or mask.dim() != 4):
            raise _sliding(self.model_type)
        return self._mask(mask, cache, past, embeds)

    def _mask(
        self, mask: Tensor | None, cache: Cache | None, past: int, embeds: Tensor, layer: int = 0
    ) -> Tensor:
        """The model's own mask in the new order, or one that is causal by positions."""
        if mask is not None and mask.dim() == 4:
            # Without a cache K and V are reordered as well.
            return take_mask(mask, self._order, self._order if cache is None else None)
        batch, tokens = embeds.shape[:2]
        real = real_tokens(mask, batch, past + tokens, embeds.device)
        keys = self._order
        if cache is not None:
            slots, first = cache.get_mask_sizes(tokens, layer)
            # Slots of fixed buffers beyond this step are nobody's.
            real = F.pad(real, (0, max(0, first + slots - past - tokens)))
            keys = torch.arange(first, first + slots, device=embeds.device).expand(batch, -1)
        seen = visibility(self._order + past, keys, real.gather(1, keys))[:, None]
        if self.config._attn_implementation != "eager":
            return seen
        hidden = torch.finfo(embeds.dtype).min
        return torch.zeros_like(seen, dtype=embeds.dtype).masked_fill(~seen, hidden)


def _moved(states: Tensor, back: Tensor) -> Tensor:
    """K or V [batch, heads, tokens, channels]."""
    return take(states.transpose(1, 2), back).transpose(1, 2)
