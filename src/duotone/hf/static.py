"""`StaticQuantizedCache`: fixed buffers and lengths on the device, for CUDA graphs and compile.

The prompt runs through a `QuantizedCache`; then its layers are frozen (`cache.static`), and every
further token is the same launches. `update()` returns an opaque handle, and one custom operation
per layer stores and attends, so a compiled decode step is one graph. Another one begins the step,
outside the compiler's CUDA graphs, and flushes the stream at the steps where that is due.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from duotone.attention.static import StaticDecoder
from duotone.cache import MemoryReport, static_memory_report
from duotone.hf.attachment import Attachment
from duotone.hf.frozen import check_freezable, frozen_stores
from duotone.hf.growing import GrowingCache
from duotone.hf.masks import padding_mask
from duotone.hf.states import StaticStates
from duotone.hf.static_ops import handle_of, static_begin, static_decode
from duotone.quant import CacheSpec


class StaticLayer(CacheLayerMixin):
    """One layer, as transformers sees it: a `QuantizedLayer` until the prompt is over."""

    is_sliding = False
    is_compileable = True
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: GrowingCache, index: int) -> None:
        super().__init__()
        self.index, self.growing = index, cache.layers[index]
        self.handle, self.seen, self.most, self.is_last = None, None, -1, False

    def freeze(self, handle: Tensor, seen: Tensor, most: int, is_last: bool) -> None:
        """From now on states go to the decoder of `handle`; seen: logical length, on the device."""
        self.growing, self.is_initialized = None, True
        self.handle, self.seen, self.most, self.is_last = handle, seen, most, is_last

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `freeze` allocates."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take this step's post-RoPE states; returns what `duotone_attention` reads."""
        if self.growing is not None:
            return self.growing.update(key_states, value_states)
        if key_states.shape[2] != 1:
            raise NotImplementedError(
                "a static cache takes one token per sequence and step after the prompt; got "
                f"{key_states.shape[2]}. Use QuantizedCache for later turns and assisted decoding."
            )
        if self.is_last:
            self.seen.add_(1)
        return StaticStates(self, key_states), StaticStates(self, value_states)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Tensor:
        """Store one token per sequence and attend, [batch, q_heads, 1, value_dim]."""
        decoder = self.handle.shape[0]
        if self.index == 0:
            query = static_begin(query, decoder)
        return static_decode(query, key, value, decoder, self.index, sm_scale)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(width of the model's mask, offset 0); padding is stored nowhere, so it is not read."""
        return (query_length if self.growing is not None else self.most), 0

    def get_seq_length(self) -> int | Tensor:
        """Logical length, padding included; on the device once it is frozen."""
        return self.growing.get_seq_length() if self.growing is not None else self.seen

    def get_max_length(self) -> int:
        """Logical length at which the buffers are full; -1 before the prompt."""
        return self.most

    # transformers 5.17 asks under this name.
    get_max_cache_shape = get_max_length


class StaticQuantizedCache(Cache):
    """Few-bit cache whose decode steps have fixed shapes and never ask the host.

    Pass it as `past_key_values`: the first forward pass (the prompt) runs as with `QuantizedCache`,
    later ones take one token per sequence. On CUDA, `generate` compiles them by itself.

    max_new_tokens: tokens after the prompt; one more is a ValueError. Only the replays of a CUDA
        graph that you captured yourself are not counted: there the device stops (a CUDA error that
        ends the process's context) where a token would be written outside its buffer.
    Other arguments: as `QuantizedCache` has them.
    Errors: ValueError for models with sliding windows (they need the model's masks) and for
    averaged codes (XQuant's weights); NotImplementedError for crop, beams and later turns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: CacheSpec,
        *,
        max_new_tokens: int,
        visual_mask: Tensor | None = None,
        impl: str = "auto",
    ) -> None:
        growing = GrowingCache(model, spec, visual_mask=visual_mask, impl=impl)
        self._take_over(growing, max_new_tokens)

    @classmethod
    def of(cls, cache: GrowingCache, max_new_tokens: int) -> StaticQuantizedCache:
        """A prefilled cache, frozen; `cache` must not be used any more."""
        if cache.ledger is None:
            raise ValueError("an empty cache cannot be frozen; run the model with it first.")
        made = cls.__new__(cls)
        made._take_over(cache, max_new_tokens)
        made._freeze()
        return made

    def _take_over(self, cache: GrowingCache, max_new_tokens: int) -> None:
        _check(cache, max_new_tokens)
        self.facts, self.spec, self.max_new_tokens = cache.facts, cache.spec, max_new_tokens
        self.growing: GrowingCache | None = cache
        self.decoder: StaticDecoder | None = None
        self._hold(cache._attachment.acquire())
        Cache.__init__(self, layers=[StaticLayer(cache, i) for i in range(self.facts.layers)])

    def _hold(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._release = weakref.finalize(self, attachment.release)

    def __copy__(self) -> StaticQuantizedCache:
        raise TypeError(
            "a shallow copy of a StaticQuantizedCache would write to the same buffers; use "
            "copy.deepcopy(cache)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticQuantizedCache:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        own = {k: v for k, v in self.__dict__.items() if k not in ("_attachment", "_release")}
        clone.__dict__.update(copy.deepcopy(own, memo))
        clone._hold(self._attachment.acquire())
        if clone.decoder is not None:
            # Layers know their decoder by a number; the copy's must not write to the original.
            clone._freeze_layers(clone.layers[0].seen, clone.layers[0].most)
        return clone

    def detach(self) -> None:
        """Let go of the model; it is restored once nothing else holds it."""
        if self.growing is not None:
            self.growing.detach()
        self._release()

    def begin_step(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Any
    ) -> None:
        """Hear of the prompt before its first layer runs (the model's pre-hook calls this)."""
        if self.growing is not None:
            mask = padding_mask(attention_mask)
            self.growing.begin_step(input_ids, inputs_embeds, mask)

    def order_queries(self, order: Tensor) -> None:
        """As `QuantizedCache` hears it, of the prompt."""
        if self.growing is not None:
            self.growing.order_queries(order)

    def end_step(self) -> None:
        """Freeze after the prompt."""
        if self.growing is not None:
            is_whole = self.growing.steps.is_complete
            self.growing.end_step()
            if is_whole:
                self._freeze()

    def _freeze(self) -> None:
        growing = self.growing
        growing._finish_step()
        stores = frozen_stores(growing, self.max_new_tokens)[0]
        self.decoder = StaticDecoder(stores, self.spec.tau, growing.impl, growing.slow)
        if stores[0].key.is_cuda:
            self.decoder.rehearse(self.facts.q_heads)
        length = growing.steps.length
        seen = torch.full((), length, dtype=torch.long, device=stores[0].key.device)
        self._freeze_layers(seen, length + self.max_new_tokens)
        self.growing = None
        growing.detach()

    def _freeze_layers(self, seen: Tensor, most: int) -> None:
        handle, last = handle_of(self.decoder, seen.device), len(self.layers) - 1
        torch._dynamo.mark_static_address(seen)
        for layer in self.layers:
            layer.freeze(handle, seen, most, layer.index == last)

    def memory(self) -> MemoryReport:
        """As of a `QuantizedCache`, spare slots included. Errors: ValueError before the prompt."""
        if self.growing is not None:
            return self.growing.memory()
        nominal, seen = self.spec.nominal_bits(self.facts.layers), self.layers[0].seen
        return static_memory_report(self.decoder.stores, nominal, length_bytes=seen.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, spare slots included. Errors: ValueError before the prompt."""
        if self.decoder is None:
            raise ValueError("the cache is empty; run the model with it first.")
        return self.decoder.nbytes

    def crop(self, tokens_to_remove: int) -> None:
        """Not with fixed buffers."""
        self._refuse("crop")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Not with fixed buffers."""
        self._refuse("reorder_cache (beam search)")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not with fixed buffers."""
        self._refuse("batch_select_indices")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not with fixed buffers."""
        self._refuse("batch_repeat_interleave")

    def reset(self) -> None:
        """Not with fixed buffers."""
        self._refuse("reset")

    def _refuse(self, what: str) -> None:
        raise NotImplementedError(f"a static cache has no {what}. Use QuantizedCache.")


def _check(cache: GrowingCache, max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer >= 1; got {max_new_tokens!r}.")
    check_freezable(cache)
