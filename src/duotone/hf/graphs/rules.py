"""Rules for decode steps by CUDA graphs: which steps a graph can be of, and which models.

A graph repeats launches with the numbers that the host gave them. A step suits one where all that
changes from token to token is in tensors of fixed shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel

from duotone.hf.cache.cache import QuantizedCache
from duotone.hf.model.cache_argument import NAMES, given_cache
from duotone.hf.model.text_attention import NAME, text_implementation

# Inputs of a step by name, tensors [..., batch, 1] that are copied before a replay.
INPUTS = ("input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids")
# Encoded pictures, which `generate` hands to a call's first step; empty where there are none.
ENCODED = "mm_encoder_outputs"
# A mask is not read: after the prompt no token is padding, and padding is stored nowhere.
LEFT_OUT = (*NAMES, "attention_mask", ENCODED)
# How names of tensors begin that say something of the prompt's pictures or sound. Some models hand
# them on; steps with positions do not read them. With one token per sequence they are inputs.
OF_PROMPTS = ("image_", "video_", "audio_", "spatial_shapes", "mm_token_type_ids")
OBSERVED = ("output_attentions", "output_hidden_states", "output_router_logits")
# Their hooks pass everything through at a step that asks for no activations.
HARMLESS = ("duotone.", "transformers.utils.output_capturing")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def graphs_on(device: torch.device) -> bool:
    """True where steps can be captured."""
    return device.type == "cuda"


def is_decode_step(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """True for one generated token per sequence after a prompt, without gradients.

    kwargs: arguments of the forward pass, as `generate` gives them.
    """
    ids, cache = kwargs.get("input_ids"), given_cache(kwargs)
    if not isinstance(ids, Tensor) or ids.shape[1:] != (1,) or not graphs_on(ids.device):
        return False
    return (
        isinstance(cache, QuantizedCache)
        and cache.length > 0
        and not _may_be_visual(cache)
        and not any(kwargs.get(name) for name in (*OBSERVED, ENCODED))
        and kwargs.get("return_dict") is True
        and kwargs.get("use_cache") is not False
        and not (model.training or torch.is_grad_enabled())
        and not (torch.is_autocast_enabled(ids.device.type) or torch.compiler.is_compiling())
    )


def reason_against_step(kwargs: dict[str, Any]) -> str | None:
    """Why a decode step cannot run in fixed buffers, or None."""
    if isinstance(kwargs.get("position_ids"), Tensor):
        return None
    return "fixed buffers need position_ids; this model takes none and counts by itself"


def other_inputs(kwargs: dict[str, Any]) -> list[str]:
    """Names of a step's tensors that fixed buffers have no place for."""
    given = {n for n, x in kwargs.items() if isinstance(x, Tensor) and not _of_prompt(n, x)}
    return sorted(given - {*INPUTS, *LEFT_OUT})


def settings_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that all steps of a graph share; of tensors, shape and type.

    One that is None counts as left out: `generate` names some from the second step on.
    """
    return {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
        if value is not None and name not in LEFT_OUT and not _of_prompt(name, value)
    }


def _of_prompt(name: str, value: Any) -> bool:
    """True for tensors that say something of the prompt."""
    return name.startswith(OF_PROMPTS) and isinstance(value, Tensor) and value.shape[1:] != (1,)


def reason_against_buffers(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why a cache of this model on `device` cannot decode in fixed buffers, or None."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "a model under torch.compile leaves its compiled code at every layer's cache"
    used = text_implementation(model)
    if used != NAME:
        return f"fixed buffers need duotone's attention; set_attn_implementation chose {used!r}"
    devices = {str(parameter.device) for parameter in model.parameters()} | {str(device)}
    if len(devices) > 1 or "meta" in devices:  # where accelerate offloads all of them
        named = ", ".join(sorted(devices))
        return f"fixed buffers need all weights on the cache's device; they are on {named}"
    return None


def reason_against_capture(model: PreTrainedModel) -> str | None:
    """Why no step of this model can be captured, or None."""
    if hook := next(_foreign_hooks(model), None):
        return f"hooks that read activations see no replays; remove them, first of {hook}"
    if (mode := _get_current_dispatch_mode()) is not None:
        return f"{type(mode).__name__} sees no operation of a replay; leave it before the call"
    return None


def _may_be_visual(cache: QuantizedCache) -> bool:
    """True where the caller's mask goes on after the tokens so far."""
    mask = cache.visual_mask
    return mask is not None and mask.shape[1] > cache.length


def _foreign_hooks(model: nn.Module) -> Iterator[str]:
    """Names of modules with forward hooks that are not ours."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield "torch.nn.Module"
    for name, module in model.named_modules():
        found = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(not _home(hook).startswith(HARMLESS) for hook in found):
            yield name or type(module).__name__


def _home(hook: Any) -> str:
    """Module that a hook's code is in."""
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""  # also of a partial
