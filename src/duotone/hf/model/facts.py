"""Facts of a model: its visual tokens and the shapes and kinds of its layers.

Facts come from the config, not from patches. A model that cannot be served correctly raises here,
by name, before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from duotone.hf.model.support import (
    EMPTY_TYPES,
    FULL_TYPE,
    LAYER_TYPES,
    STATE_TYPES,
    WINDOW_TYPE,
    check_supported,
    takes_pictures,
)
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.classes import class_counts
from duotone.quant.honours import check_honoured

logger = logging.get_logger(__name__)

# Families that the test suite runs end to end, and the inputs that it gives them. Others pass the
# structural checks below or raise.
TESTED_FAMILIES = {
    "bamba": ("text",),
    "chameleon": ("pictures",),
    "cohere2": ("text",),
    "emu3": ("pictures",),
    "gemma3": ("pictures",),
    "glm4v": ("pictures",),
    "granitemoehybrid": ("text",),
    "internvl": ("pictures",),
    "jamba": ("text",),
    "lfm2": ("text",),
    "lfm2_moe": ("text",),
    "lfm2_vl": ("pictures",),
    "llama": ("text",),
    "llava": ("pictures",),
    "llava_onevision": ("pictures", "video"),
    "mistral": ("text",),
    "nemotron_h": ("text",),
    "olmo_hybrid": ("text",),
    "qwen2": ("text",),
    "qwen2_5_vl": ("pictures", "video"),
    "qwen2_vl": ("pictures", "video"),
    "qwen3": ("text",),
    "qwen3_5": ("pictures",),
    "qwen3_5_moe": ("pictures",),
    "qwen3_next": ("text",),
    "qwen3_vl": ("pictures",),
    "smolvlm": ("pictures",),
}
VISUAL_TOKEN_FIELDS = ("image_token_id", "video_token_id")


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a model's cache and the ids of its visual tokens.

    layers: whose K and V are packed; a spec counts these, and `sliding` is of these.
    states: numbers in the model of the layers that keep states of fixed size instead, of
        `state_kinds`. empty: of those that keep nothing, such as a layer of experts alone.
    windows: of those with a sliding window, which stay in 16 bit, where other layers see all
        tokens. window: how many tokens such layers see, packed or not.
    takes_pictures: a part of the model looks at pictures; without ids only the caller's
        `visual_mask` says where their tokens are.
    """

    model_type: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    sliding: tuple[bool, ...]
    visual_token_ids: tuple[int, ...]
    takes_pictures: bool = False
    states: tuple[int, ...] = ()
    state_kinds: tuple[str, ...] = ()
    empty: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    window: int | None = None

    @property
    def own(self) -> tuple[int, ...]:
        """Numbers in the model of the layers that stay transformers' own."""
        return tuple(sorted((*self.states, *self.windows, *self.empty)))

    @property
    def packed(self) -> tuple[int, ...]:
        """Numbers in the model of the layers whose K and V are packed."""
        own = self.own
        return tuple(n for n in range(self.layers + len(own)) if n not in own)

    @property
    def has_windows(self) -> bool:
        """Some layers see only the latest tokens."""
        return any(self.sliding) or bool(self.windows)

    @property
    def is_multimodal(self) -> bool:
        """Some tokens may be visual."""
        return self.takes_pictures or bool(self.visual_token_ids)

    def signature(self) -> dict[str, Any]:
        """Facts that a saved cache shares with the model that loads it."""
        facts = asdict(self)
        return {k: facts[k] for k in ("model_type", "layers", "kv_heads", "head_dim")}


def model_facts(
    model_or_config: PreTrainedModel | PreTrainedConfig, *, visual_mask: Tensor | None = None
) -> ModelFacts:
    """Read and check a model's config.

    visual_mask: what the caller says of visual tokens, if anything.
    Errors: ValueError naming what is unsupported, and for a model that takes pictures where
    neither its config nor a mask tells which tokens are theirs.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            f"expected a transformers model or its config; got a {type(config).__name__}. "
            "By name: duotone.loading.load_config(name)."
        )
    text = config.get_text_config(decoder=True)
    check_supported(config, text)
    ids, pictures = visual_token_ids(config), takes_pictures(model_or_config)
    if pictures and not ids and visual_mask is None:
        raise _unknown_places(config.model_type)
    if config.model_type not in TESTED_FAMILIES:
        logger.warning_once(
            f"duotone's tests do not cover model_type {config.model_type!r}; its config passes "
            "the structural checks. Compare with the 16-bit cache once (duotone compare)."
        )
    dtype = getattr(model_or_config, "dtype", None) or text.dtype
    q_heads, types = text.num_attention_heads, getattr(text, "layer_types", None) or ()
    states, empty = numbers_of(types, *STATE_TYPES), numbers_of(types, *EMPTY_TYPES)
    windows = _windows(text)
    return ModelFacts(
        model_type=config.model_type,
        layers=text.num_hidden_layers - len((*states, *windows, *empty)),
        q_heads=q_heads,
        kv_heads=_kv_heads(text),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // q_heads,
        element_bytes=dtype.itemsize if dtype is not None else 2,
        sliding=_packed_windows(text, bool(windows)),
        visual_token_ids=ids,
        takes_pictures=pictures,
        states=states,
        state_kinds=STATE_TYPES[types[states[0]]] if states else (),
        empty=empty,
        windows=windows,
        window=getattr(text, "sliding_window", None),
    )


def _unknown_places(name: str) -> ValueError:
    return ValueError(
        f"{name!r} takes pictures, but its config has none of {VISUAL_TOKEN_FIELDS}, so its "
        "visual tokens would pass for text. Set the field, or give "
        "visual_mask=[batch, tokens] to enable or QuantizedCache (all False: no pictures)."
    )


def _kv_heads(text: PreTrainedConfig) -> int:
    if getattr(text, "multi_query", False):
        return 1
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def numbers_of(types: Sequence[str], *wanted: str) -> tuple[int, ...]:
    """Numbers of the layers of these types."""
    return tuple(number for number, kind in enumerate(types) if kind in wanted)


def _windows(text: PreTrainedConfig) -> tuple[int, ...]:
    """Windows next to layers that see all tokens: few tokens, which packing makes no fewer.

    Packed layers keep every token. Where all layers have a window, they are packed all the same.
    """
    types = getattr(text, "layer_types", None) or ()
    if FULL_TYPE not in types or getattr(text, "sliding_window", None) is None:
        return ()
    return numbers_of(types, WINDOW_TYPE)


def _packed_windows(text: PreTrainedConfig, own_windows: bool) -> tuple[bool, ...]:
    types = getattr(text, "layer_types", None)
    if types:
        packed = (FULL_TYPE,) if own_windows else LAYER_TYPES
        return tuple(t == WINDOW_TYPE for t in types if t in packed)
    window = getattr(text, "sliding_window", None)
    return (window is not None,) * text.num_hidden_layers


def visual_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids of the placeholders of visual tokens; () for a text-only model."""
    ids = (getattr(config, field, None) for field in VISUAL_TOKEN_FIELDS)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _check_channels(head_dim: int, tensor: TensorSpec) -> None:
    """Raise where channels do not come out in whole groups or classes."""
    class_counts(tensor, head_dim)
    group = tensor.group or head_dim
    if tensor.along == "channels" and head_dim % group and group % head_dim:
        raise ValueError(
            f"a group along channels must divide head_dim, which is {head_dim} in this model; got "
            f"group={group}. Use a divisor, or None for the whole head."
        )


def check_no_states(facts: ModelFacts, what: str) -> None:
    """Raise ValueError where a model's layers keep states, of which `what` knows nothing."""
    if facts.states:
        raise ValueError(
            f"{what} knows layers with K and V only; {facts.model_type!r} has {len(facts.states)} "
            "layers that keep a state of linear attention. Run it in a QuantizedCache instead."
        )


def check_spec(facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise ValueError if `spec` does not fit this model or would do nothing on it."""
    check_honoured(spec)
    spec.check_depth(facts.layers)
    for tensor in spec.tensors:
        _check_channels(facts.head_dim, tensor)
    touches_text = isinstance(spec.text, KVSpec)
    if not facts.is_multimodal and not touches_text and isinstance(spec.visual, KVSpec):
        raise ValueError(
            f"this scheme quantizes visual tokens only, and {facts.model_type!r} has none. "
            "Choose a scheme with a text policy, e.g. duotone.scheme('kivi', bits=2)."
        )
    if not facts.is_multimodal and spec.evict is not None and spec.evict.which == "visual":
        raise ValueError(
            f"this scheme evicts visual tokens only, and {facts.model_type!r} has none. "
            "Use Eviction(which='all')."
        )
    if spec.background is not None and any(facts.sliding):
        raise ValueError(
            "spans with a background can only be seen as a whole, and sliding windows hide parts "
            f"of them; {facts.model_type!r} has such layers. Use a scheme without a background."
        )
    if spec.visual == "text" and not touches_text:
        raise ValueError(
            "visual='text' needs a text policy to join; got text='dense'. "
            "Use visual='dense', or give text a KVSpec."
        )
