"""Bytes of states and of pictures in layers that stay transformers' own, by a config alone.

States of a convolution have the model's type. Recurrent ones are in 32 bit, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

RECURRENT_BYTES = 4  # of a number
# (numbers in the states of a layer's convolution, numbers in its recurrent state), of a sequence.
Sizes = tuple[int, int]


def _gated_delta(text: PreTrainedConfig) -> Sizes:
    """Keys and values, per head a matrix from one to the other; q is as wide as the keys."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return (2 * keys + values) * text.linear_conv_kernel_dim, values * text.linear_key_head_dim


def _mamba(text: PreTrainedConfig) -> Sizes:
    inner = text.mamba_expand * text.hidden_size
    return inner * text.mamba_d_conv, inner * text.mamba_d_state


def _mamba2(text: PreTrainedConfig) -> Sizes:
    inner, state = int(text.mamba_expand * text.hidden_size), text.mamba_d_state
    mixed = inner + 2 * text.mamba_n_groups * state
    return mixed * text.mamba_d_conv, text.mamba_n_heads * text.mamba_d_head * state


def _nemotron(text: PreTrainedConfig) -> Sizes:
    inner, state = text.mamba_num_heads * text.mamba_head_dim, text.ssm_state_size
    return (inner + 2 * text.n_groups * state) * text.conv_kernel, inner * state


def _short_conv(text: PreTrainedConfig) -> Sizes:
    return text.hidden_size * text.conv_L_cache, 0


# By the type of the language model. Of families that are not here, sizes are unknown.
SIZES: dict[str, Callable[[PreTrainedConfig], Sizes]] = {
    "bamba": _mamba2,
    "granitemoehybrid": _mamba2,
    "jamba": _mamba,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
}


def state_bytes(text: PreTrainedConfig, layers: int, element_bytes: int) -> int | None:
    """Bytes of the states of so many layers, for one sequence; None where they are unknown."""
    if not layers:
        return 0
    try:
        convolution, recurrent = SIZES[text.model_type](text)
    except (KeyError, AttributeError):  # a release of transformers may have other fields
        return None
    return layers * (convolution * element_bytes + recurrent * RECURRENT_BYTES)


def picture_bytes(config: PreTrainedConfig, elements: int, element_bytes: int) -> int | None:
    """Bytes of a picture's K and V in cross layers; None where its places are unknown.

    elements: numbers of K and V of a place, in all of these layers. Processors fill up every
    picture to the largest number of tiles. A place is a patch, or the class of its tile.
    """
    if not elements:
        return 0
    tower = getattr(config, "vision_config", None)
    fields = ("max_num_tiles", "image_size", "patch_size")
    sizes = [getattr(tower, name, None) for name in fields]
    if not all(isinstance(size, int) for size in sizes):
        return None
    tiles, side, patch = sizes
    return tiles * ((side // patch) ** 2 + 1) * elements * element_bytes
