"""Facts that modules hold beside their saved tensors: attributes, buffers, adapters' state.

Neither the configuration nor a state dict has them, and all of them can change K and V.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LEAVES = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))
# Attributes of a module that are read by themselves, are bookkeeping of torch, are ours, or say
# something of the last prompt alone. Hooks are asked for by `hf.graphs.rules`.
LEFT_OUT = frozenset(
    (
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook"),
        *("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("__deepcopy__", "_hf_hook", "generate", "generation_config", "rope_deltas"),
        "prepare_inputs_for_generation",
    )
)
# Numbers that are of training alone, or do nothing without another one.
TRAINING = frozenset(("p", "momentum", "norm_type"))
# Positions whose frequencies follow the longest prompt so far.
MOVING = frozenset(("dynamic", "longrope"))
LISTED = 256  # numbers of a buffer that are kept; of a larger one they are spread over it


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of a module's own attributes, without `LEFT_OUT`."""
    return ((name, x) for name, x in vars(module).items() if name not in LEFT_OUT)


def number_facts(model: nn.Module) -> dict[str, Any]:
    """{name: numbers} of float attributes and of buffers that are not saved, JSON-safe.

    Modules of equal layers share a name, with * for their numbers; it has one value where theirs
    are equal.
    """
    found: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        for name, x in (*_floats(module), *_buffers(module)):
            found.setdefault(re.sub(r"\b\d+\b", "*", f"modules.{path}.{name}"), []).append(x)
    return {
        name: values[0] if all(x == values[0] for x in values) else values
        for name, values in found.items()
    }


def _floats(module: nn.Module) -> Iterator[tuple[str, float]]:
    for name, x in attributes(module):
        if type(x) is float and name not in TRAINING and "dropout" not in name:
            yield name, x


def _buffers(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    for name in sorted(module._non_persistent_buffers_set):
        x = module._buffers.get(name)
        if x is not None and not x.is_meta and not _moves(module, name):
            x = x.detach()
            numbers = (torch.view_as_real(x) if x.is_complex() else x).flatten()
            yield name, numbers[:: max(1, -(-len(numbers) // LISTED))].tolist()


def _moves(module: nn.Module, name: str) -> bool:
    """True for frequencies that a longer prompt replaces; the original ones beside them stay."""
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(kinds & MOVING) and name.endswith("inv_freq") and "original" not in name


def adapter_facts(model: nn.Module) -> list[Any]:
    """[path, state] of every module with PEFT adapters, JSON-safe; [] for a model without.

    The state says which adapters are active, merged or disabled, and has all their plain
    settings, e.g. scalings. Their weights are parameters of the model.
    """
    return [[path, _state(m)] for path, m in model.named_modules() if _has_adapters(m)]


def _has_adapters(module: nn.Module) -> bool:
    """True for PEFT's layers and wrappers; every transformers model has `active_adapters`."""
    return hasattr(module, "merged_adapters") or hasattr(module, "_active_adapter")


def _state(module: nn.Module) -> dict[str, Any]:
    state = {
        name: _plain(x) for name, x in attributes(module) if name[0] != "_" and name != "training"
    }
    # Properties of PEFT's classes, which read private attributes and class defaults.
    for name in ("active_adapters", "disable_adapters", "merged_adapters"):
        state[name] = _plain(getattr(module, name, None))
    return state


def _plain(x: Any) -> Any:
    """A value without its objects, whose identity lasts no longer than the process."""
    if isinstance(x, dict):
        return sorted([str(name), _plain(each)] for name, each in x.items())
    if isinstance(x, (set, frozenset)):
        return sorted(map(str, x))
    if isinstance(x, (list, tuple)):
        return [_plain(each) for each in x]
    if isinstance(x, Tensor):
        return x.detach().flatten().tolist()
    return x if type(x) in (bool, int, float, str) else str(x) if type(x) in LEAVES else None
