"""Refusals of models: each names the model type and the property that rules it out.

All of it is read from the config, but for the window, which only the model's own code tells.
"""

from __future__ import annotations

import inspect
import sys

from transformers import PreTrainedConfig, PreTrainedModel

FULL_TYPE, WINDOW_TYPE = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL_TYPE, WINDOW_TYPE)
# Layers that keep states of fixed size, with the kinds of states, and layers that keep nothing.
STATE_TYPES = {
    "linear_attention": ("conv_states", "recurrent_states"),
    "conv": ("conv_states",),
}
EMPTY_TYPES = ("mlp", "moe")
# Families with such layers whose models keep the states in the cache, as not all do.
STATE_FAMILIES = (
    "bamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
# Config fields of attention that a key-value cache of this kind cannot represent, and why.
UNSUPPORTED_FIELDS = {
    "kv_lora_rank": "multi-head latent attention caches a latent, not K and V",
    "attn_logit_softcapping": "softcapped scores are not a plain softmax(q K)",
    "num_kv_shared_layers": "layers that share K and V of other layers",
    "kv_sharing_modes": "layers that share K and V of other layers",
    "attention_chunk_size": "chunked local attention",
    "cross_attention_layers": "visual tokens in cross attention, outside the cache",
    "cross_layer_interval": "visual tokens in cross attention, outside the cache",
    "lambda_std_dev": "differential attention pairs K with other heads' V than the cache does",
}
# What a cache's shape follows from.
SHAPE_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "sliding_window",
)
REQUIRED_FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
VISION_WORDS = ("vision", "visual", "vq_")


def check_supported(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raise ValueError for a config whose cache is not one K and V per token and layer.

    text: the part of `config` that describes the language model.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"decoder-only models are supported; {name!r} is an encoder-decoder, whose cross "
            "attention has a cache of its own."
        )
    _check_layers_alike(name, text)
    for field, why in UNSUPPORTED_FIELDS.items():
        if getattr(text, field, None):
            raise ValueError(f"model_type {name!r} is not supported: {why} ({field}).")
    known, types = set(LAYER_TYPES), set(getattr(text, "layer_types", None) or ())
    if text.model_type in STATE_FAMILIES:
        known |= {*STATE_TYPES, *EMPTY_TYPES}
    odd = sorted(types - known)
    if odd:
        raise ValueError(
            f"layers of type {LAYER_TYPES} are supported; {name!r} has {odd}. "
            "Use the model's own cache."
        )
    if types and not types & set(LAYER_TYPES):
        raise ValueError(
            f"some layers must have K and V; {name!r} has only {sorted(types)}. Use the model's "
            "own cache."
        )
    missing = [field for field in REQUIRED_FIELDS if not getattr(text, field, None)]
    if missing:
        raise ValueError(
            f"the config of a decoder with a cache of K and V has {REQUIRED_FIELDS}; that of "
            f"{name!r} has no {missing}. Use the model's own cache, or give the language model "
            "inside if it has one."
        )


def _check_layers_alike(name: str, text: PreTrainedConfig) -> None:
    # Such a config raises its own error as soon as one of these fields is read.
    by_layer = set(getattr(text, "per_layer_attributes", None) or ())
    odd = sorted(by_layer & {*SHAPE_FIELDS, *UNSUPPORTED_FIELDS})
    if odd:
        raise ValueError(
            f"all layers must have caches of one shape; in {name!r} these vary by layer: {odd}. "
            "Use the model's own cache."
        )


def takes_pictures(model_or_config: PreTrainedModel | PreTrainedConfig) -> bool:
    """True if a part of the model looks at pictures, wherever their tokens then go."""
    if isinstance(model_or_config, PreTrainedModel):
        if "pixel_values" in inspect.signature(model_or_config.forward).parameters:
            return True
        model_or_config = model_or_config.config
    return any(
        isinstance(part, dict | PreTrainedConfig) and any(word in name for word in VISION_WORDS)
        for name, part in vars(model_or_config).items()
    )


def check_window(model: PreTrainedModel) -> None:
    """Raise ValueError for a sliding window that only the model's own cache would apply.

    Packed layers keep all tokens and the model's mask hides the old ones. A model that never
    makes such a mask relies on a cache that forgets them; with ours it would see them all.
    """
    module = sys.modules.get(type(model.get_decoder()).__module__)
    if not hasattr(module, "create_sliding_window_causal_mask"):
        raise ValueError(
            f"{model.config.model_type!r} has a sliding window but makes no mask for it: its own "
            "cache forgets old tokens, and a quantized cache keeps them. Use the model's own cache."
        )
