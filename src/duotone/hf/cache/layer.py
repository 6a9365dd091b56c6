"""One layer of a `QuantizedCache`, as transformers sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from duotone.cache import LayerStore
from duotone.hf.cache.states import LazyStates, StaticStates, states_of
from duotone.hf.cache.timeline import Timeline
from duotone.hf.model.layers import ANSWER_TYPE
from duotone.hf.model.text_attention import NOT_COMPILED


class QuantizedLayer(CacheLayerMixin):
    """One layer: a place in a timeline.

    Operations on the batch or the length are the cache's, because a ledger may serve all layers.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    # transformers' names for dense tokens, which no layer of ours has.
    keys = values = None
    prefill_length: int | None = None
    # What an indexer keeps: keys [batch, tokens, channels], positions [axes, batch, tokens].
    indexer_keys: Tensor | None = None
    indexer_position_ids: Tensor | None = None

    def __init__(self, timeline: Timeline, index: int) -> None:
        self.timeline, self.index = timeline, index
        if timeline.facts.spares_prompt:
            # The model's mask looks for a layer of this type. None: until the first step.
            self._layer_type = ANSWER_TYPE
        if timeline.facts.crosses:
            # Mllama asks every layer for its pictures.
            self.keys = torch.empty(0)

    @property
    def store(self) -> LayerStore:
        """The layer's tokens."""
        return self.timeline.stores[self.index]

    @property
    def is_initialized(self) -> bool:
        """True once there are tokens, or were."""
        return self.timeline.is_begun(self.index)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: containers grow from the first states."""

    @torch.compiler.disable(reason=NOT_COMPILED)
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[LazyStates, LazyStates] | tuple[StaticStates, StaticStates]:
        """Take this step's post-RoPE states; returns what `duotone_attention` reads."""
        timeline, index = self.timeline, self.index
        if timeline.frozen is not None:
            key = StaticStates(timeline, index, key_states)
            return key, StaticStates(timeline, index, value_states)
        length = timeline.take(index, key_states, value_states)
        if timeline.facts.spares_prompt:
            self.set_prefill_length(length)
        return states_of(timeline, index, key_states, value_states, length)

    def set_prefill_length(self, length: int) -> None:
        """Hear of the prompt's length before its first part comes, where windows spare prompts."""
        self.prefill_length = self.prefill_length or length

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Take an indexer's keys of this step; returns those of all tokens, padding included."""
        known = self.indexer_keys
        self.indexer_keys = keys if known is None else torch.cat((known, keys), 1)
        return self.indexer_keys

    @property
    def indexer_bytes(self) -> int:
        """Bytes of what an indexer keeps."""
        kept = (self.indexer_keys, self.indexer_position_ids)
        return sum(x.nbytes for x in kept if x is not None)

    def pick_indexer_rows(self, index: Tensor) -> None:
        """Pick sequences of what an indexer keeps."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[index]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, index]

    def forget(self) -> None:
        """Forget where the prompt ended, and what an indexer keeps."""
        self.prefill_length = self.indexer_keys = self.indexer_position_ids = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(logical length after `query_length` more tokens, offset 0)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Logical length, padding included, as the model counts."""
        return self.timeline.seen(self.index)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    # transformers 5.17 asks under this name.
    get_max_cache_shape = get_max_length
