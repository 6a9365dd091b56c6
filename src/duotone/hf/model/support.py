"""Refusals of models: each names the model type and the property that rules it out.

All of it is read from the config, but for the window, which only the model's own code tells.
"""

from __future__ import annotations

import inspect
import sys

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from duotone.hf.model.layers import (
    CHUNK_TYPE,
    CROSS_TYPE,
    EMPTY_TYPES,
    INDEXED_TYPE,
    LAYER_TYPES,
    READER_TYPE,
    STATE_TYPES,
    WINDOW_TYPE,
    layer_configs,
    layer_kinds,
    packed_layers,
    sharing_modes,
)
from duotone.hf.versions import check_release

# Families with layers that keep states whose models keep the states in the cache, as not all do.
STATE_FAMILIES = (
    "bamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp_text",
)
# Families whose indexers choose by masks alone; others look for the name of the attention.
INDEXED_FAMILIES = ("qwen4_exp_text",)
# Families whose models cache a latent and expand it by themselves.
LATENT_FAMILIES = ("deepseek_v3", "mistral4")
# Families whose models cap scores by an argument of their attention.
CAPPED_FAMILIES = ("gemma2", "vaultgemma")
# Families whose layers attend to pictures by the way: neither tokens nor the cache hold any.
CROSS_FAMILIES = ("idefics", "mllama_text_model")
# Families whose pictures are tokens before all ids, where neither an id nor a mask reaches.
PREFIX_FAMILIES = ("git",)
# Families that a field of `UNSUPPORTED_FIELDS` does not rule out.
KNOWN_ALL_THE_SAME = {
    "attn_logit_softcapping": CAPPED_FAMILIES,
    "kv_lora_rank": LATENT_FAMILIES,
    "cross_attention_layers": CROSS_FAMILIES,
    "cross_layer_interval": CROSS_FAMILIES,
}
# Config fields of attention that a key-value cache of this kind cannot represent, and why.
UNSUPPORTED_FIELDS = {
    "kv_lora_rank": "multi-head latent attention caches a latent, not K and V",
    "attn_logit_softcapping": "softcapped scores are not a plain softmax(q K)",
    "cross_attention_layers": "visual tokens in cross attention, outside the cache",
    "cross_layer_interval": "visual tokens in cross attention, outside the cache",
    "qk_layer_norms": "K is normalized between the cache and its attention",
    "n_recurrent_loops": "layers run several times a token, with K and V of each time",
    "lambda_std_dev": "differential attention pairs K with other heads' V than the cache does",
}
# Fields that all layers must have in common; heads and channels may vary by layer.
COMMON_FIELDS = ("num_hidden_layers", "hidden_size", "sliding_window", "attention_chunk_size")
REQUIRED_FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
# Inputs [batch, tokens] that are true at visual tokens, of models without ids for them.
PLACE_INPUTS = ("image_embeds_position_mask",)
VISION_WORDS = ("vision", "visual", "vq_")


def check_supported(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raise ValueError for a config whose cache is not one K and V per token and layer.

    text: the part of `config` that describes the language model.
    """
    name = config.model_type
    check_release(name)
    if any(getattr(part, "is_encoder_decoder", False) for part in (config, text)):
        raise ValueError(
            f"decoder-only models are supported; {name!r} is an encoder-decoder, whose cross "
            "attention has a cache of its own."
        )
    if name in PREFIX_FAMILIES:
        raise ValueError(
            f"visual tokens must have ids or be masked among the prompt's tokens; those of "
            f"{name!r} come before its ids. Use the model's own cache."
        )
    _check_layers_alike(name, text)
    for field, why in UNSUPPORTED_FIELDS.items():
        is_known = text.model_type in KNOWN_ALL_THE_SAME.get(field, ())
        if getattr(text, field, None) and not is_known:
            raise ValueError(f"model_type {name!r} is not supported: {why} ({field}).")
    missing = [field for field in REQUIRED_FIELDS if not _has(text, field)]
    if missing:
        raise ValueError(
            f"the config of a decoder with a cache of K and V has {REQUIRED_FIELDS}; that of "
            f"{name!r} has no {missing}. Use the model's own cache, or give the language model "
            "inside if it has one."
        )
    _check_layers(name, text)


def _has(text: PreTrainedConfig, field: str) -> bool:
    return field in _by_layer(text) or bool(getattr(text, field, None))


def _by_layer(text: PreTrainedConfig) -> set[str]:
    """Fields that vary by layer; the config raises where one of them is read."""
    return set(getattr(text, "per_layer_attributes", None) or ())


def _check_layers_alike(name: str, text: PreTrainedConfig) -> None:
    odd = sorted(_by_layer(text) & {*COMMON_FIELDS, *UNSUPPORTED_FIELDS})
    if odd:
        raise ValueError(
            f"layers may differ in heads and channels alone; in {name!r} these vary by layer: "
            f"{odd}. Use the model's own cache."
        )


def _check_layers(name: str, text: PreTrainedConfig) -> None:
    """Raise ValueError for layers that are neither packed nor kept as transformers' own."""
    try:
        kinds = set(layer_kinds(text))
    except ValueError as error:
        raise ValueError(
            f"layers that share K and V must have a source; in {name!r}: {error} Use the model's "
            "own cache."
        ) from error
    known = {*LAYER_TYPES, READER_TYPE, CROSS_TYPE}
    if text.model_type in STATE_FAMILIES:
        known |= {*STATE_TYPES, *EMPTY_TYPES}
    if text.model_type not in INDEXED_FAMILIES:
        known -= {INDEXED_TYPE}
    odd = sorted(kinds - known)
    if odd:
        raise ValueError(
            f"layers of type {sorted(known & {*LAYER_TYPES})} are supported; {name!r} has {odd}. "
            "Use the model's own cache."
        )
    if not kinds & set(LAYER_TYPES):
        raise ValueError(
            f"some layers must have K and V; {name!r} has only {sorted(kinds)}. Use the model's "
            "own cache."
        )
    if {WINDOW_TYPE, CHUNK_TYPE} <= kinds:
        raise ValueError(
            f"layers may have windows or chunks; {name!r} has both. Use the model's own cache."
        )
    _check_source(name, text)
    if any(getattr(layer, "skip", None) for layer in layer_configs(text)):
        raise ValueError(
            f"every layer must have all of its parts; {name!r} skips some. Use the model's own "
            "cache."
        )


def _check_source(name: str, text: PreTrainedConfig) -> None:
    """Raise ValueError where layers read K and V of a packed layer that is not the last one.

    Later packed layers would store what its readers still want as it was.
    """
    modes, packed = sharing_modes(text), packed_layers(text, layer_kinds(text))
    sources = [number for number in packed if modes[number] == "store"]
    if {*modes} - {None, "store", "reuse"} or {*sources} - {packed[-1]}:
        raise ValueError(
            f"layers may read K and V of the last packed layer, {packed[-1]} in {name!r}; there "
            f"they read those of {sources}, by {sorted(filter(None, {*modes}))}. Use the model's "
            "own cache."
        )


def attends_across(config: PreTrainedConfig) -> bool:
    """True if layers attend to pictures next to the tokens, which are all text."""
    return config.get_text_config(decoder=True).model_type in CROSS_FAMILIES


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


def input_of_places(model_or_config: PreTrainedModel | PreTrainedConfig) -> str | None:
    """The forward pass' input that says where pictures are in its tokens; None of a config."""
    if not isinstance(model_or_config, PreTrainedModel):
        return None
    taken = inspect.signature(model_or_config.forward).parameters
    return next((name for name in PLACE_INPUTS if name in taken), None)


def check_sinks(model: PreTrainedModel) -> None:
    """Raise ValueError for learned sinks: numbers that join the softmax beside the scores."""
    modules = model.get_decoder().modules()
    found = {type(m).__name__ for m in modules if isinstance(getattr(m, "sinks", None), Tensor)}
    if found:
        raise ValueError(
            f"attention on packed K and V has no learned sinks; {model.config.model_type!r} has "
            f"them in {sorted(found)}. Use the model's own cache."
        )


def check_window(model: PreTrainedModel) -> None:
    """Raise ValueError for a sliding window that only the model's own cache would apply.

    Packed layers keep all tokens and the model's mask hides the old ones. A model that never
    makes such a mask relies on a cache that forgets them; with ours it would see them all.
    """
    module = sys.modules.get(type(model.get_decoder()).__module__)
    if not any(hasattr(module, maker) for maker in WINDOW_MASKS):
        raise ValueError(
            f"{model.config.model_type!r} has a sliding window but makes no mask for it: its own "
            "cache forgets old tokens, and a quantized cache keeps them. Use the model's own cache."
        )
