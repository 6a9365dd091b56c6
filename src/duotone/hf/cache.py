"""`QuantizedCache`: a transformers `Cache` whose tokens live in duotone's containers."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from duotone.cache import AppendPlan, LayerStore, Ledger, MemoryReport, Segment, memory_report
from duotone.cache.layer import share_codes
from duotone.hf.attachment import Attachment
from duotone.hf.facts import ModelFacts, check_spec, model_facts
from duotone.hf.lazy import LazyStates
from duotone.hf.masks import real_tokens, visual_tokens
from duotone.hf.serialization import load_cache, save_cache
from duotone.quant import CacheSpec


class QuantizedLayer(CacheLayerMixin):
    """One layer: a `LayerStore` that follows the cache's ledger.

    Operations on the batch or the length are the cache's, because one ledger serves all layers.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: QuantizedCache, index: int) -> None:
        super().__init__()
        self.index, self.store = index, cache.new_store(index)
        self.belong_to(cache)

    def belong_to(self, cache: QuantizedCache) -> None:
        """Point at the cache, weakly: a cache must free its memory when its last user goes."""
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> QuantizedCache:
        """The cache this layer is part of."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("this layer's cache does not exist any more; keep a reference to it")
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: containers grow from the first states."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take this step's post-RoPE states; returns what `duotone_attention` reads."""
        self.is_initialized = True
        self.cache.take(self, key_states, value_states)
        return LazyStates(self, "key", key_states), LazyStates(self, "value", value_states)

    def segments(self, before: bool = False, mask: Tensor | None = None) -> list[Segment]:
        """The stored tokens, as they are or as they were before this step."""
        plan = self.cache.plan
        return self.store.segments(plan.before if before else plan.after, mask)

    def materialize(self, which: Literal["key", "value"], new: Tensor) -> Tensor:
        """K or V of all tokens in logical order, dequantized; zeros at padding."""
        plan = self.cache.plan
        stored = self.cache.is_stored(self)
        out = new.new_zeros(*new.shape[:2], plan.after.seen, new.shape[3])
        state = plan.after if stored else plan.before
        for segment, roll in self.store.placed_segments(state):
            _scatter(out, segment.states(which), roll.positions, roll.lengths)
        if not stored:
            out[:, :, plan.before.seen :] = new
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(logical length after `query_length` more tokens, offset 0)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Logical length, padding included, as the model counts."""
        return self.cache.seen(self)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    # transformers 5.17 asks under this name.
    get_max_cache_shape = get_max_length


def _scatter(out: Tensor, states: Tensor, positions: Tensor, lengths: Tensor) -> None:
    for b, n in enumerate(lengths.tolist()):
        out[b, :, positions[b, :n].long()] = states[b, :, :n].to(out.dtype)


def reads_weights(spec: CacheSpec) -> bool:
    """Some tensor's channels are ordered by the model's weights."""
    return any(tensor.read_power for tensor in spec.tensors)


class QuantizedCache(Cache):
    """Few-bit cache for one model and one batch of sequences.

    Pass it as `past_key_values` to `model.generate` or to the model itself. It listens to the
    model's inputs to learn which tokens are visual and which are padding.

    model: any supported transformers model. spec: what to do with which tokens.
    visual_mask: [batch, tokens] True at visual tokens, for callers with `inputs_embeds` (the ids,
        and so the positions, are unknown then). Rows may be fewer than the batch by an integer
        factor (beams, num_return_sequences).
    impl: the decode attention ("auto", "reference", "triton").
    Errors: ValueError for a model or a combination that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: CacheSpec,
        *,
        visual_mask: Tensor | None = None,
        impl: str = "auto",
    ) -> None:
        self.facts: ModelFacts = model_facts(model)
        check_spec(self.facts, spec)
        self.spec, self.impl, self.visual_mask = spec, impl, visual_mask
        self.ledger: Ledger | None = None
        self.plan: AppendPlan | None = None
        self._taken: set[int] = set()
        self._pending: tuple[QuantizedLayer, Tensor, Tensor] | None = None
        self._hold(Attachment.to(model))
        super().__init__(layers=[QuantizedLayer(self, i) for i in range(self.facts.layers)])
        self._share_codes()

    def new_store(self, index: int) -> LayerStore:
        """An empty store for one layer."""
        spec = self.spec.at_layer(index)
        if not reads_weights(spec):
            return LayerStore(spec)
        return LayerStore(spec, self._attachment.read_powers(self.facts)[index])

    def _share_codes(self) -> None:
        """Tell the stores whose codes they read, and with whom they average theirs."""
        stores, share = [layer.store for layer in self.layers], self.spec.share
        for which in ("key", "value"):
            runs: dict[int, list[LayerStore]] = {}
            for index, store in enumerate(stores):
                source = self.spec.source(which, index, len(stores))
                runs.setdefault(source, []).append(store)
            for source, run in runs.items():
                share_codes(which, run, stores[source], share and share.weights)

    def _hold(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._release = weakref.finalize(self, attachment.release)

    def detach(self) -> None:
        """Let go of the model; it is restored once nothing else holds it."""
        self._release()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        own = {k: v for k, v in self.__dict__.items() if k not in ("_attachment", "_release")}
        clone.__dict__.update(copy.deepcopy(own, memo))
        for layer in clone.layers:
            layer.belong_to(clone)
        clone._hold(self._attachment.acquire())
        return clone

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
        seen = self._length
        visual = visual_tokens(
            self.facts, input_ids, inputs_embeds, self.visual_mask, slice(seen, seen + tokens)
        )
        self._plan_step(visual, real_tokens(attention_mask, batch, tokens, given.device))

    def _plan_step(self, visual: Tensor, real: Tensor) -> None:
        batch = len(real)
        if self.ledger is None:
            self.ledger = Ledger(self.spec, batch, real.device)
        elif len(self.ledger.state.dense.lengths) != batch:
            raise ValueError(
                f"this cache holds {len(self.ledger.state.dense.lengths)} sequences; got a batch "
                f"of {batch}. Use a cache per batch, or batch_repeat_interleave."
            )
        self.plan, self._taken = self.ledger.plan(visual, real), set()
        if self.plan.flush_first is not None:
            # All at once: a layer may read codes that a later one keeps, or has a part in.
            for layer in self.layers:
                layer.store.flush(self.plan.flush_first)

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
        Errors: ValueError if this cache holds tokens already or the layers do not fit.
        """
        if self._length:
            raise ValueError(f"absorb needs an empty cache; this one holds {self._length} tokens.")
        held = {getattr(layer, "keys", None) is not None and layer.keys.shape[2]
                for layer in dense.layers}  # fmt: skip
        if len(dense.layers) != len(self.layers) or len(held) != 1 or not all(held):
            raise ValueError(
                f"expected {len(self.layers)} layers with K and V of the same tokens; got "
                f"{len(dense.layers)} layers of {sorted(map(int, held))} tokens. "
                "Sliding-window layers forget tokens: prefill without them."
            )
        batch, _, tokens, _ = dense.layers[0].keys.shape
        device = dense.layers[0].keys.device
        real = real_tokens(attention_mask, batch, tokens, device)
        none = torch.zeros_like(real)
        visual = none if visual_mask is None else visual_mask.to(device).bool()
        self._plan_step(visual, real)
        try:
            for layer, source in zip(self.layers, dense.layers, strict=True):
                layer.is_initialized = True
                self.take(layer, source.keys, source.values)
                self.commit()
        finally:
            self.end_step()

    def take(self, layer: QuantizedLayer, key: Tensor, value: Tensor) -> None:
        """One layer's states of the current step, as `update()` hands them over."""
        if self.plan is None or layer.index in self._taken:
            raise RuntimeError(
                f"layer {layer.index} was updated outside a step that the cache has heard of. "
                "Call the model that the cache was made for, not one of its inner modules, "
                "and pass the cache as `past_key_values`."
            )
        self.commit()
        self._taken.add(layer.index)
        self._pending = (layer, key, value)
        if self.plan.is_decode_step:
            self.commit()

    def commit(self) -> None:
        """Quantize and store the states taken last; their dense copies are released."""
        if self._pending is not None:
            layer, key, value = self._pending
            self._pending = None
            layer.store.apply(self.plan, key.detach(), value.detach())

    def end_step(self) -> None:
        """Nothing temporary outlives a step, also one that broke off (the model's hook calls this).

        A step that reached all layers is stored; of another one, which makes the cache unusable,
        the states and codes that wait for later layers are let go.
        """
        if len(self._taken) == len(self.layers):
            self.commit()
        self._pending = None
        for layer in self.layers:
            for member in layer.store.runs.values():
                member.waiting.clear()

    def is_stored(self, layer: QuantizedLayer) -> bool:
        """This step's states of `layer` are in its store already."""
        return self._pending is None or self._pending[0] is not layer

    def seen(self, layer: QuantizedLayer) -> int:
        """Logical length of one layer: the current step counts once the layer has taken it."""
        if self.plan is None:
            return self._length
        return self.plan.after.seen if layer.index in self._taken else self.plan.before.seen

    @property
    def _length(self) -> int:
        return self.ledger.state.seen if self.ledger is not None else 0

    def _finish_step(self) -> None:
        self.commit()
        if self.plan is not None and len(self._taken) != len(self.layers):
            raise RuntimeError(
                f"the last step reached {len(self._taken)} of {len(self.layers)} layers, so the "
                "cache is not consistent any more. Start again with a new cache."
            )

    def memory(self) -> MemoryReport:
        """Every byte this cache holds, and what 16 bit would hold."""
        self._finish_step()
        if self.ledger is None:
            raise ValueError("the cache is empty; run the model with it first.")
        nominal = self.spec.nominal_bits(self.facts.layers)
        return memory_report([layer.store for layer in self.layers], self.ledger.state, nominal)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, or a positive length to keep (5.17)."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 may hand over a tensor
        self._finish_step()
        removed = -tokens_to_remove if tokens_to_remove < 0 else self._length - tokens_to_remove
        if tokens_to_remove == 0 or removed <= 0 or self.ledger is None:
            return
        if removed > self._length:
            raise ValueError(f"cannot remove {removed} tokens of {self._length}.")
        self.ledger.crop(self._length - removed)
        for layer in self.layers:
            layer.store.truncate(self.ledger.state)
        self.plan = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence b becomes a copy of sequence beam_idx[b]."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences (ids or a boolean mask)."""
        self._pick_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        if self.ledger is not None:
            batch = len(self.ledger.state.dense.lengths)
            self._pick_rows(torch.arange(batch).repeat_interleave(repeats))

    def _pick_rows(self, index: Tensor) -> None:
        self._finish_step()
        if self.ledger is None:
            return
        device = self.ledger.state.dense.lengths.device
        index = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        index = index.to(device)
        self.ledger.rows(index)
        for layer in self.layers:
            layer.store.rows(index)
        self.plan = None

    def reset(self) -> None:
        """Forget everything."""
        self.ledger = self.plan = self._pending = None
        self._taken = set()
        for layer in self.layers:
            layer.store, layer.is_initialized = self.new_store(layer.index), False
        self._share_codes()

    def save(self, path: str | Path) -> None:
        """Write the packed cache to a safetensors file."""
        self._finish_step()
        save_cache(self, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> QuantizedCache:
        """Read a saved cache back. Errors: ValueError if it was made for another model."""
        return load_cache(cls, path, model)
