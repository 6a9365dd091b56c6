"""One layer of a `QuantizedCache`, as transformers sees it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from duotone.cache import Segment
from duotone.hf.cache.attention import NOT_COMPILED
from duotone.hf.cache.states import LazyStates, StaticStates
from duotone.quant.autocast import without_autocast

if TYPE_CHECKING:
    from duotone.hf.cache.cache import QuantizedCache


class QuantizedLayer(CacheLayerMixin):
    """One layer: a `LayerStore` that follows its ledger.

    Operations on the batch or the length are the cache's, because a ledger may serve all layers.
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

    @torch.compiler.disable(reason=NOT_COMPILED)
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take this step's post-RoPE states; returns what `duotone_attention` reads."""
        self.is_initialized = True
        if self.cache.frozen is not None:
            return StaticStates(self, key_states), StaticStates(self, value_states)
        self.cache.take(self, key_states, value_states)
        return LazyStates(self, "key", key_states), LazyStates(self, "value", value_states)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Tensor:
        """Store one token per sequence and attend, [batch, q_heads, 1, value_dim].

        Of a cache that holds still, whose step has begun.
        """
        return self.cache.frozen.decoder.attend(self.index, query, key, value, sm_scale)

    def segments(self, before: bool = False, mask: Tensor | None = None) -> list[Segment]:
        """The stored tokens, as they are or as they were before this step."""
        self.cache.thaw()
        return self.store.segments(self.cache.steps.state(self.index, before), mask)

    def materialize(self, which: Literal["key", "value"], new: Tensor) -> Tensor:
        """K or V of all tokens in logical order, dequantized; zeros at padding.

        Errors: NotImplementedError where tokens are evicted (no mask would hide their zeros).
        """
        if self.cache.spec.evict is not None:
            raise _foreign("evicts tokens")
        self.cache.thaw()
        steps = self.cache.steps
        stored = steps.is_stored(self.index)
        out = new.new_zeros(*new.shape[:2], steps.seen(self.index), new.shape[3])
        state = steps.state(self.index, before=not stored)
        with without_autocast(new.device):
            for segment, roll in self.store.placed_segments(state):
                _scatter(out, segment.states(which), roll.positions, roll.lengths)
        if not stored:
            out[:, :, steps.step.start :] = new
        return out

    def for_foreign(self, which: Literal["key", "value"], new: Tensor) -> Tensor:
        """`materialize` for an attention function that is not ours.

        Errors: NotImplementedError also where scores are calibrated: it would not do that.
        """
        if self.cache.spec.tau is not None:
            raise _foreign("calibrates scores (tau)")
        return self.materialize(which, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(logical length after `query_length` more tokens, offset 0)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Logical length, padding included, as the model counts."""
        cache = self.cache
        return cache.steps.seen(self.index) if cache.frozen is None else cache.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    # transformers 5.17 asks under this name.
    get_max_cache_shape = get_max_length


def _scatter(out: Tensor, states: Tensor, positions: Tensor, lengths: Tensor) -> None:
    for b, n in enumerate(lengths.tolist()):
        out[b, :, positions[b, :n].long()] = states[b, :, :n].to(out.dtype)


def _foreign(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"a cache that {what} needs duotone's own attention; another function asked for dense K "
        "and V. Leave the model's attention implementation as it is."
    )
