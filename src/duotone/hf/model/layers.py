"""Layers of a model as its config has them: the kind of each, and the shape of its K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

FULL_TYPE, WINDOW_TYPE, CHUNK_TYPE = "full_attention", "sliding_attention", "chunked_attention"
# A chunk differs from a window in its mask alone: transformers' caches keep as many tokens of it.
WINDOW_TYPES = (WINDOW_TYPE, CHUNK_TYPE)
# A window over the answer alone: all tokens see the prompt.
ANSWER_TYPE = "reference_sliding_attention"
# An indexer, which keeps keys of its own, chooses the tokens that a query sees.
INDEXED_TYPE = "indexed_attention"
LAYER_TYPES = (FULL_TYPE, *WINDOW_TYPES, ANSWER_TYPE, INDEXED_TYPE)
# Layers whose queries see some of the tokens, by a mask.
MASKED_TYPES = (*WINDOW_TYPES, ANSWER_TYPE, INDEXED_TYPE)
WINDOW_FIELDS = {WINDOW_TYPE: "sliding_window", CHUNK_TYPE: "attention_chunk_size"}
# Layers that keep states of fixed size, with the kinds of states, and layers that keep nothing.
STATE_TYPES = {
    "linear_attention": ("conv_states", "recurrent_states"),
    "conv": ("conv_states",),
}
EMPTY_TYPES = ("mlp", "moe")
# Attention that reads K and V of an earlier layer and stores none.
READER_TYPE = "reader"
# Attention to pictures alone, whose K and V take no token's place.
CROSS_TYPE = "cross_attention"


@dataclass(frozen=True)
class LayerShape:
    """Heads of a layer with K and V, and channels of one of them.

    latent_rope: channels that stand in the place of V in a latent cache. There K is a latent, which
    the model expands to K and V of all heads by itself; None for any other layer.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    latent_rope: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a head of K and of V, as a cache takes them."""
        return self.head_dim, self.latent_rope or self.head_dim

    @property
    def elements(self) -> int:
        """Numbers of K and V per token."""
        return self.kv_heads * sum(self.head_dims)


def layer_configs(text: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """The config of every layer: a field that varies by layer has its value there alone."""
    return text.per_layer_config


def layer_kinds(text: PreTrainedConfig) -> tuple[str, ...]:
    """Type of every layer, with `READER_TYPE` and `CROSS_TYPE`, which configs do not name."""
    types = getattr(text, "layer_types", None) or [_inferred(each) for each in layer_configs(text)]
    crosses = getattr(text, "cross_attention_layers", None) or ()
    types = [CROSS_TYPE if number in crosses else kind for number, kind in enumerate(types)]
    pairs = zip(types, sharing_modes(text), strict=True)
    return tuple(READER_TYPE if mode == "reuse" else kind for kind, mode in pairs)


def sharing_modes(text: PreTrainedConfig) -> list[str | None]:
    """Part of every layer: "reuse" reads K and V of another one, "store" is read by others.

    transformers 5.17 names readers alone.
    """
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is not None:
        return list(modes)
    readers = getattr(text, "num_kv_shared_layers", None) or 0
    return [None] * (len(layer_configs(text)) - readers) + ["reuse"] * readers


def _inferred(layer: PreTrainedConfig) -> str:
    fields = WINDOW_FIELDS.items()
    has = (kind for kind, field in fields if getattr(layer, field, None) is not None)
    return next(has, FULL_TYPE)


def layer_shape(layer: PreTrainedConfig) -> LayerShape:
    """Shape of a layer with K and V, by its own config."""
    q_heads = layer.num_attention_heads
    if latent := getattr(layer, "kv_lora_rank", None):
        return LayerShape(q_heads, 1, latent, layer.qk_rope_head_dim)
    kv_heads = getattr(layer, "num_key_value_heads", None) or q_heads
    return LayerShape(
        q_heads,
        1 if getattr(layer, "multi_query", False) else kv_heads,
        getattr(layer, "head_dim", None) or layer.hidden_size // q_heads,
    )


def numbers_of(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    """Numbers of the layers of these kinds."""
    return tuple(number for number, kind in enumerate(kinds) if kind in wanted)


def packed_layers(text: PreTrainedConfig, kinds: Sequence[str]) -> list[int]:
    """Numbers of the layers whose K and V are packed."""
    windows = own_windows(text, kinds)
    return [number for number in numbers_of(kinds, *LAYER_TYPES) if number not in windows]


def own_windows(text: PreTrainedConfig, kinds: Sequence[str]) -> tuple[int, ...]:
    """Windows next to layers that see all tokens: few tokens, which packing makes no fewer.

    Packed layers keep every token. Where all layers have a window, they are packed all the same.
    """
    if FULL_TYPE not in kinds or window_of(text, kinds) is None:
        return ()
    return numbers_of(kinds, *WINDOW_TYPES)


def window_of(text: PreTrainedConfig, kinds: Sequence[str]) -> int | None:
    """Tokens that a query in a window, or in a full chunk, sees, itself included."""
    fields = [WINDOW_FIELDS[kind] for kind in dict.fromkeys(kinds) if kind in WINDOW_FIELDS]
    return getattr(text, fields[0], None) if fields else None
