"""A transformers `Cache` whose tokens live in duotone's containers, which grow."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from duotone.cache import LayerStore, Ledger, MemoryReport, memory_report
from duotone.cache.sharing import share_layers
from duotone.hf.attachment import Attachment
from duotone.hf.cache.absorb import absorb
from duotone.hf.cache.frozen import Frozen
from duotone.hf.cache.layer import QuantizedLayer
from duotone.hf.cache.saved import load_cache, save_cache
from duotone.hf.cache.timeline import Steps
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.fitting import fitting_facts
from duotone.hf.model.implementation import planned_layers, slow_paths
from duotone.hf.model.masks import real_tokens, visual_tokens
from duotone.quant import CacheSpec
from duotone.quant.autocast import without_autocast
from duotone.quant.checks import put_off


class QuantizedCache(Cache):
    """Few-bit cache for one model and one batch of sequences.

    Pass it as `past_key_values` to `model.generate` or to the model itself. It listens to the
    model's inputs to learn which tokens are visual and which are padding.

    model: any supported transformers model. spec: what to do with which tokens.
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
        self.facts: ModelFacts = fitting_facts(model, spec, visual_mask)
        self.plans = planned_layers(model, self.facts, spec, impl)
        self.spec, self.impl, self.visual_mask = spec, impl, visual_mask
        self._device, self.slow = model.device, slow_paths(model)
        self.steps = Steps(spec, self.facts.layers)
        self.frozen: Frozen | None = None
        self._hold(Attachment.to(model))
        super().__init__(layers=[QuantizedLayer(self, i) for i in range(self.facts.layers)])
        share_layers([layer.store for layer in self.layers], self.spec)

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self._device

    @property
    def length(self) -> int:
        """Logical length after the last whole step, padding included."""
        return self.steps.length if self.frozen is None else self.frozen.length

    @property
    def token_bytes(self) -> int:
        """Bytes of one dense token per sequence, in all layers; 0 while the cache is empty."""
        stores = [layer.store for layer in self.layers if layer.store.key is not None]
        dense = (x for store in stores for x in (store.key, store.value))
        return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in dense)

    @property
    def ledger(self) -> Ledger | None:
        """Places of the tokens of all layers (of the first, if layers evict); None while empty."""
        self.thaw()
        return self.steps.ledgers[0] if self.steps.ledgers else None

    def new_store(self, index: int) -> LayerStore:
        """An empty store for one layer."""
        return LayerStore(self.spec.at_layer(index), self.plans[index].layouts)

    def _hold(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._release = weakref.finalize(self, attachment.release)

    def detach(self) -> None:
        """Let go of the model; it is restored once nothing else holds it."""
        self._release()

    def hold_still(self, room: int) -> Frozen:
        """Freeze in place: fixed buffers with room for `room` steps of one token per sequence.

        Whatever else is asked of the cache thaws it first.
        Errors: ValueError, before anything is changed, where fixed buffers cannot hold it.
        """
        self._finish_step()
        self.frozen = Frozen(self, room)
        return self.frozen

    def thaw(self) -> None:
        """Go on with buffers that grow; nothing where they do already."""
        if self.frozen is not None:
            frozen, self.frozen = self.frozen, None
            with without_autocast(self._device):
                frozen.thaw(self)

    def __copy__(self) -> QuantizedCache:
        raise TypeError(
            "a shallow copy of a QuantizedCache would write to the same buffers; use "
            "copy.deepcopy(cache)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.thaw()
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        shared = ("_attachment", "_release", "plans")
        own = {k: v for k, v in self.__dict__.items() if k not in shared}
        clone.__dict__.update(copy.deepcopy(own, memo), plans=self.plans)
        for layer in clone.layers:
            layer.belong_to(clone)
        clone._hold(self._attachment.acquire())
        return clone

    def __reduce__(self) -> Any:
        raise TypeError(
            "a QuantizedCache is tied to its model and cannot be pickled; use cache.save(path) and "
            "QuantizedCache.load(path, model)."
        )

    def begin_step(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        """Hear of the next step before its first layer runs (the model's pre-hook calls this)."""
        self._finish_step()
        given = input_ids if input_ids is not None else inputs_embeds
        batch, tokens = given.shape[:2]
        seen = self.steps.length
        visual = visual_tokens(
            self.facts, input_ids, inputs_embeds, self.visual_mask, slice(seen, seen + tokens)
        )
        self.begin(visual, real_tokens(attention_mask, batch, tokens, given.device, seen))

    def begin(self, visual: Tensor, real: Tensor) -> None:
        """Begin a step of these tokens, [batch, tokens] True at visual ones and at no padding."""
        self.steps.begin(visual, real)
        for layer, plan in zip(self.layers, self.steps.plans, strict=True):
            # All at once: a layer may read codes that a later one keeps, or has a part in.
            if plan is not None and plan.flush_first is not None:
                layer.store.flush(plan.flush_first)

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
        absorb(self, dense, visual_mask, attention_mask)

    def take(self, layer: QuantizedLayer, key: Tensor, value: Tensor) -> None:
        """One layer's states of the current step, as `update()` hands them over."""
        self.commit()
        self.steps.take(layer.index, key, value)
        if self.steps.is_decode_step:
            self.commit()

    def order_queries(self, order: Tensor) -> None:
        """Hear that this step's queries come in another order [batch, tokens] than its tokens."""
        self.steps.order = order

    def commit(self) -> None:
        """Quantize and store the states whose plans are known; their dense copies are released."""
        with put_off(self.steps.checks):
            for index in self.steps.due():
                self.layers[index].store.apply(*self.steps.release(index))

    def end_step(self) -> None:
        """Nothing temporary outlives a step, also one that broke off (the model's hook calls this).

        A step that reached all layers is stored, and checks that were put off are made. Of another
        one, which makes the cache unusable, the states and codes that wait for later layers are
        let go. Errors: ValueError for numbers that cannot be quantized.
        """
        try:
            if self.steps.is_complete:
                self.commit()
                self.steps.settle()
                self.steps.finish()
        finally:
            self.steps.let_go()
            for layer in self.layers:
                for member in layer.store.runs.values():
                    member.waiting.clear()

    def _finish_step(self) -> None:
        self.thaw()
        self.commit()
        self.steps.settle()
        self.steps.check_whole()
        self.steps.finish()

    def memory(self) -> MemoryReport:
        """Every byte this cache holds, and what 16 bit would hold.

        While it holds still, free slots of its buffers count, too.
        """
        if self.frozen is not None:
            return self.frozen.memory(self)
        self._finish_step()
        if self.ledger is None:
            raise ValueError("the cache is empty; run the model with it first.")
        states = [ledger.state for ledger in self.steps.ledgers]
        nominal = self.spec.nominal_bits(self.facts.layers)
        return memory_report([layer.store for layer in self.layers], states, nominal)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, or a positive length to keep (5.17)."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 may hand over a tensor
        self._finish_step()
        length = self.steps.length
        removed = -tokens_to_remove if tokens_to_remove < 0 else length - tokens_to_remove
        if tokens_to_remove == 0 or removed <= 0 or self.ledger is None:
            return
        if removed > length:
            raise ValueError(f"cannot remove {removed} tokens of {length}.")
        self.steps.crop(length - removed)
        with without_autocast(self._device):
            for layer in self.layers:
                layer.store.truncate(self.steps.state(layer.index))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence b becomes a copy of sequence beam_idx[b]."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences (ids or a boolean mask)."""
        self._pick_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        if self.ledger is not None:
            self._pick_rows(torch.arange(self.steps.batch).repeat_interleave(repeats))

    def _pick_rows(self, index: Tensor) -> None:
        if self.frozen is not None and index.dtype != torch.bool and len(index) == self.steps.batch:
            self.frozen.reorder(index.to(self._device))
            return
        self._finish_step()
        if self.ledger is None:
            return
        device = self.ledger.state.dense.lengths.device
        index = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        index = index.to(device)
        self.steps.rows(index)
        with without_autocast(self._device):
            for layer in self.layers:
                layer.store.rows(index)

    def reset(self) -> None:
        """Forget everything."""
        self.frozen = None
        self.steps = Steps(self.spec, self.facts.layers)
        for layer in self.layers:
            layer.store, layer.is_initialized = self.new_store(layer.index), False
        share_layers([layer.store for layer in self.layers], self.spec)

    def save(self, path: str | Path) -> None:
        """Write the packed cache to a safetensors file, with digests of what it was made by.

        The first time it reads all weights of the model once.
        Errors: ValueError for an empty cache, for numbers in it that are not finite, and where the
        model does not exist any more.
        """
        self._finish_step()
        with without_autocast(self._device):
            save_cache(self, self._attachment.model, path)

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
            return load_cache(cls, path, model, visual_mask, waive, impl)
