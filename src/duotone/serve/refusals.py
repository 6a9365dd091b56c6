"""Options, models and devices that a layer with pages refuses at start, each with a remedy.

config: vLLM's `VllmConfig`. This file does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from duotone.attention.cuda.shared import runtime
from duotone.serve.plugin import DTYPES


def check_dtype(config: Any) -> None:
    """Raise ValueError for the cache dtype of another backend."""
    if config.cache_config.cache_dtype not in DTYPES:
        raise ValueError(
            f"duotone's backend serves --kv-cache-dtype {' or '.join(DTYPES)}; got "
            f"{config.cache_config.cache_dtype}. Name one of them, or leave out "
            "--attention-backend CUSTOM."
        )


def check_layer(others: Sequence[str]) -> None:
    """Raise ValueError for other layers than full attention of decoders. others: what they have."""
    if others:
        raise ValueError(
            f"duotone serves full attention of decoders; got {', '.join(others)}. Leave such "
            "layers in 16 bit by --kv-cache-dtype-skip-layers (numbers, or sliding_window), or "
            "serve this model with --kv-cache-dtype auto."
        )


def check_kind(layer: Any) -> None:
    """Raise ValueError for a kind of layer of which pages would make full attention.

    vLLM wraps the backends of chunked, static-sink and prefix attention, and makes other caches for
    them. `PagesAttention` and `OwnAttention` put others in their place.
    """
    if (kind := type(layer).__name__) != "Attention":
        raise ValueError(
            f"duotone serves vLLM's Attention as it is; got {kind} in {layer.layer_name}. Serve "
            "this model with --kv-cache-dtype auto."
        )
    if layer.head_size_v != layer.head_size:
        raise ValueError(
            f"pages hold K and V of one head_dim; got {layer.head_size} and {layer.head_size_v} in "
            f"{layer.layer_name}. Serve this model with --kv-cache-dtype auto."
        )


def check_options(config: Any) -> None:
    """Raise ValueError for options of the engine that pages do not bear."""
    if config.speculative_config is not None:
        raise ValueError("duotone serves without drafts; got --speculative-config. Leave it out.")
    if config.parallel_config.use_ubatching:
        raise ValueError(
            "duotone serves a step as one batch, whose numbers all of its layers share; got "
            "microbatches. Leave out --enable-dbo and --ubatch-size."
        )
    if config.model_config.is_hybrid and config.cache_config.enable_prefix_caching:
        raise ValueError(
            "duotone serves models whose layers keep states without prefix caching, by which a "
            "tiny Qwen3.5 answered wrongly; got it on. Give --no-enable-prefix-caching."
        )
    check_device(torch.device(config.device_config.device_type))


def check_device(device: torch.device) -> None:
    """Raise ValueError for a GPU without kernels, on which each step would wait for the host."""
    if device.type == "cuda" and (reason := runtime.missing(device)):
        raise ValueError(
            f"duotone serves pages on a GPU by kernels: {reason}. Install duotone[vllm] there, or "
            "serve this model with --kv-cache-dtype auto."
        )
