"""A transformers `Cache` whose tokens live in duotone's containers, which grow."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from duotone.cache import Ledger, MemoryReport, memory_report
from duotone.hf.attachment import Attachment
from duotone.hf.cache.absorb import absorb
from duotone.hf.cache.attention import attach
from duotone.hf.cache.layer import QuantizedLayer
from duotone.hf.cache.saved import fill, read_cache, save_cache
from duotone.hf.cache.scales import KeyScales
from duotone.hf.cache.timeline import Timeline
from duotone.hf.model.extreme_keys import with_wide_parameters
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.fitting import fitting_facts
from duotone.hf.model.implementation import planned_layers, slow_paths
from duotone.hf.model.key_scales import key_scales
from duotone.hf.model.masks import real_tokens, visual_tokens
from duotone.hf.model.speaker import speaker_of
from duotone.quant import CacheSpec
from duotone.quant.autocast import without_autocast


class QuantizedCache(Cache):
    """Few-bit cache for one model and one batch of sequences.

    Pass it to `model.generate` or to the model itself, as `past_key_values`; transformers 5.24
    calls it `cache`. It listens to the model's inputs to learn which tokens are visual and which
    are padding.

    model: any supported transformers model. spec: what to do with which tokens; 8-bit parameters
        become 16-bit ones in layers whose keys are extreme (`hf.model.extreme_keys`).
    visual_mask: [batch, tokens] True at visual tokens, for callers with `inputs_embeds` (the ids,
        and so the positions, are unknown then). Rows may be fewer than the batch by an integer
        factor (beams, num_return_sequences).
    impl: the decode attention ("auto", "reference", "triton", "cuda").
    Errors: ValueError for a model or a combination that is not supported, and for impl="cuda" where
    the CUDA kernels would leave tokens to others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: CacheSpec,
        *,
        visual_mask: Tensor | None = None,
        impl: str = "auto",
    ) -> None:
        facts = fitting_facts(model, spec, visual_mask)
        self._begin(model, facts, with_wide_parameters(model, facts, spec), visual_mask, impl)

    def _begin(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        spec: CacheSpec,
        visual_mask: Tensor | None,
        impl: str,
    ) -> None:
        """Make an empty cache of `spec` as it is: that of a file says how its codes are kept."""
        plans = planned_layers(model, facts, spec, impl)
        self.visual_mask, self.device = visual_mask, model.device
        scales = KeyScales(key_scales(model, facts, spec))
        self.timeline = Timeline(spec, facts, plans, impl, slow_paths(model), scales)
        self._model = weakref.ref(model)
        self._hold(attach(speaker_of(model)))
        super().__init__(layers=_layers(self.timeline))

    @property
    def spec(self) -> CacheSpec:
        """Policies of visual and of text tokens."""
        return self.timeline.spec

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model."""
        return self.timeline.facts

    @property
    def length(self) -> int:
        """Logical length after the last whole step, padding included."""
        return self.timeline.length

    @property
    def token_bytes(self) -> int:
        """Bytes of one dense token per sequence, in all layers; 0 while the cache is empty."""
        stores = [store for store in self.timeline.stores if store.key is not None]
        dense = (x for store in stores for x in (store.key, store.value))
        return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in dense)

    @property
    def ledger(self) -> Ledger | None:
        """Places of the tokens of all layers (of the first, if layers evict); None while empty."""
        self.timeline.thaw()
        return self.timeline.ledgers[0] if self.timeline.ledgers else None

    @property
    def _packed(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]

    def _hold(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._release = weakref.finalize(self, attachment.release)

    def detach(self) -> None:
        """Let go of the model; it is restored once nothing else holds it."""
        self._release()

    def __copy__(self) -> QuantizedCache:
        raise TypeError(
            "a shallow copy of a QuantizedCache would write to the same buffers; use "
            "copy.deepcopy(cache)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.timeline.thaw()
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        shared = ("_attachment", "_release")
        own = {k: v for k, v in self.__dict__.items() if k not in shared}
        clone.__dict__.update(copy.deepcopy(own, memo))
        clone._hold(self._attachment.acquire())
        return clone

    def __reduce__(self) -> Any:
        raise TypeError(
            "a QuantizedCache is tied to its model and cannot be pickled; use cache.save(path) and "
            "QuantizedCache.load(path, model)."
        )

    def begin_step(self, inputs: Mapping[str, Any]) -> None:
        """Hear of the next step before its first layer runs (the model's pre-hook calls this).

        inputs: of the model's forward pass, by name.
        """
        self.timeline.settle()
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        batch, tokens = given.shape[:2]
        seen = self.length
        places = inputs.get(self.facts.mask_input)
        span = slice(seen, seen + tokens)
        visual = visual_tokens(self.facts, ids, embeds, self.visual_mask, span, places)
        real = real_tokens(inputs.get("attention_mask"), batch, tokens, given.device, seen)
        self.timeline.begin(visual, real)

    def end_step(self, is_whole: bool = True) -> None:
        """End a step (the model's hook calls this). is_whole: False where it broke off."""
        self.timeline.end(is_whole)

    def absorb(
        self,
        dense: Cache,
        *,
        visual_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Take over the tokens of a prefilled 16-bit cache, as if this cache had been there.

        dense: a cache whose layers hold `keys` and `values` [batch, kv_heads, tokens, head_dim] of
            the same tokens, e.g. a DynamicCache; it is left as it is. One prefill can so serve
            many specs. visual_mask, attention_mask: [batch, tokens]; by default no token is visual
            and none is padding.
        Errors: ValueError if this cache holds tokens already, evicts tokens (by queries, which a
        cache does not hold) or the layers do not fit.
        """
        absorb(self.timeline, dense, visual_mask, attention_mask)

    def order_queries(self, order: Tensor) -> None:
        """Hear that this step's queries come in another order [batch, tokens] than its tokens."""
        self.timeline.order = order

    @property
    def is_initialized(self) -> bool:
        """True once tokens are stored; some models mask their first step by it."""
        return self.timeline.is_begun(0)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Logical length, padding included; on the device while a captured step runs."""
        timeline = self.timeline
        if timeline.frozen is None:
            return super().get_seq_length(layer_idx)
        return timeline.frozen.length if timeline.count is None else timeline.count

    def memory(self) -> MemoryReport:
        """Every byte this cache holds, and what 16 bit would hold.

        While it holds still, free slots of its buffers count, too.
        """
        timeline = self.timeline
        nominal = self.spec.nominal_bits(self.facts.layers)
        if timeline.frozen is None:
            timeline.settle()
        if not timeline.ledgers:
            raise ValueError("the cache is empty; run the model with it first.")
        states = [ledger.state for ledger in timeline.ledgers]
        scales = timeline.scales.nbytes
        if timeline.frozen is not None:
            report = timeline.frozen.memory(states, nominal).with_params(scales)
            return report.with_states(timeline.own.nbytes)
        window = self.facts.window if any(self.facts.sliding) else None
        report = memory_report(timeline.stores, states, nominal, window).with_params(scales)
        indexers = sum(layer.indexer_bytes for layer in self._packed)
        return report.with_states(timeline.own.nbytes + indexers)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, or a positive length to keep (5.17)."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 may hand over a tensor
        self.timeline.settle()
        length = self.length
        removed = -tokens_to_remove if tokens_to_remove < 0 else length - tokens_to_remove
        if tokens_to_remove == 0 or removed <= 0 or not length:
            self.timeline.own.trim()
            return
        if removed > length:
            raise ValueError(f"cannot remove {removed} tokens of {length}.")
        with without_autocast(self.device):
            self.timeline.crop(length - removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence b becomes a copy of sequence beam_idx[b]."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences (ids or a boolean mask)."""
        self._pick_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._pick_rows(torch.arange(self.timeline.batch).repeat_interleave(repeats))

    def _pick_rows(self, index: Tensor) -> None:
        timeline = self.timeline
        if not timeline.ledgers:
            return
        index = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        index = index.to(timeline.ledgers[0].state.dense.lengths.device)
        with without_autocast(self.device):
            if timeline.frozen is not None and len(index) == timeline.batch:
                timeline.frozen.reorder(index)
                return
            timeline.settle()
            timeline.rows(index)
            for layer in self._packed:
                layer.pick_indexer_rows(index)

    def reset(self) -> None:
        """Forget everything."""
        self.timeline.reset()
        for layer in self._packed:
            layer.forget()

    def save(self, path: str | Path) -> None:
        """Write the packed cache to a safetensors file, with digests of what it was made by.

        The first time it reads all weights of the model once.
        Errors: ValueError for an empty cache, for numbers in it that are not finite, and where the
        model does not exist any more. Tokens that could not be packed later are refused as well.
        """
        self.timeline.settle()
        if self.facts.spares_prompt or self.facts.is_indexed:
            raise ValueError(
                "files do not say where a prompt ends, nor do they hold keys of an indexer, as "
                f"caches of {self.facts.model_type!r} do. Keep the cache in memory (copy.deepcopy)."
            )
        with without_autocast(self.device):
            save_cache(self.timeline, self._model(), path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        visual_mask: Tensor | None = None,
        waive: Collection[str] = (),
        impl: str = "auto",
    ) -> Self:
        """Read a saved cache back.

        visual_mask: [batch, tokens] of the whole conversation, for later turns whose visual tokens
            the ids do not tell.
        waive: checks that shall not refuse the file. "weights": the model has other weights, or
            PEFT adapters in another state. "config": a configuration with other fields, or
            modules with other attributes and buffers. "dtype": another type than the model had;
            dense tokens are converted. "bases": calibrated bases have other content.
            "checksum": the file is damaged, or of before there were checksums. Shapes, places and
            numbers are always checked.
        impl: the decode attention, as for a new cache.
        Errors: ValueError naming the file for any other one than `save` has written with this
        model. FileNotFoundError.
        """
        with without_autocast(model.device):
            spec, saved, states, scales = read_cache(path, model, visual_mask, waive)
            cache = cls.__new__(cls)
            cache._begin(model, fitting_facts(model, spec, visual_mask), spec, visual_mask, impl)
            cache.timeline.scales = scales.on(model.device)
            fill(cache.timeline, saved, states, model.device)
        return cache


def _layers(timeline: Timeline) -> list[Any]:
    """Layers in the model's order: ours, and transformers' own."""
    ours = (QuantizedLayer(timeline, index) for index in range(timeline.facts.layers))
    own = timeline.own.layers
    count = timeline.facts.layers + len(own)
    return [own[number] if number in own else next(ours) for number in range(count)]
