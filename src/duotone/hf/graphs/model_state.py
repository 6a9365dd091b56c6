"""State of a model that a captured decode step has read on the host.

A capture holds the addresses of weights and the Python of its moment: which modules there were,
their attributes, torch's switches. `ModelState` is a snapshot of all that. Two snapshots are the
same as long as a step that is captured now would launch what the earlier one launched.

Not seen: Python objects in attributes that are neither tensors, modules, numbers nor their
containers; contents of tensors, but for few numbers on the CPU; towers for pictures, which no
decode step runs.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from duotone.hf.model.module_facts import LEAVES, attributes

# Containers are read this deep, if they are not longer.
DEPTH, LONGEST = 3, 200
# Tensors on the CPU of so many numbers are read: a launch has a number as an argument.
FEW = 64
# Switches of matrix products on CUDA devices.
PRODUCTS = (
    "fp32_precision",
    "allow_fp16_accumulation",
    "allow_bf16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction_split_k",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction_split_k",
)


class ModelState:
    """A snapshot of a model; it keeps nothing of the model alive.

    It takes some 3 ms for 28 layers.
    """

    def __init__(self, model: nn.Module) -> None:
        # Objects that are told apart by their identity; an address may be used again.
        self._objects: list[weakref.ref] = []
        # Many modules have one configuration, whose attributes are slow to read.
        self._configs: dict[int, Any] = {}
        self._found = self._read(model)

    def is_same(self, later: ModelState) -> bool:
        """True where nothing of the model has changed since."""
        return all(known() is not None for known in self._objects) and self._found == later._found

    def _read(self, model: nn.Module) -> list[Any]:
        found, waiting, towers = _switches(), [model], _towers(model)
        while waiting:
            module = waiting.pop()
            own = vars(module)
            children = own["_modules"]
            found += (type(module), *children)
            for kept in (own["_parameters"], own["_buffers"]):
                found += (None if x is None else self._tensor(x) for x in kept.values())
            for name, x in attributes(module):
                if not (name == "forward" and module is model):
                    found.append((name, self._plain(x, DEPTH)))
            for child in children.values():
                found.append(self._object(child))
                if child is not None and child not in towers:
                    waiting.append(child)
        return found

    def _plain(self, x: Any, depth: int) -> Any:
        """Return what stands for an attribute's value and can be compared."""
        if type(x) in LEAVES:
            return x
        if id(x) in self._configs:
            return self._configs[id(x)]
        if isinstance(x, PreTrainedConfig):
            found = self._configs[id(x)] = (self._object(x), x._attn_implementation)
            return found
        if isinstance(x, Tensor):
            return self._tensor(x)
        if depth and isinstance(x, (dict, list, tuple)) and len(x) < LONGEST:
            pairs = x.items() if isinstance(x, dict) else enumerate(x)
            return [(self._plain(key, 0), self._plain(each, depth - 1)) for key, each in pairs]
        if isinstance(x, (set, frozenset)):
            return sorted(map(str, x))
        return self._object(x)

    def _tensor(self, x: Tensor) -> tuple[Any, ...]:
        if is_traceable_wrapper_subclass(x):
            # A move swaps what is inside, and only where nobody refers to the wrapper weakly.
            inside = [self._tensor(getattr(x, name)) for name in x.__tensor_flatten__()[0]]
            return id(x), type(x), x.shape, inside
        if x.layout != torch.strided:  # a sparse tensor has no address
            return self._object(x), x.dtype, x.shape, x.device
        numbers = str(x.tolist()) if x.is_cpu and x.numel() <= FEW else None
        return x.data_ptr(), numbers, x.dtype, x.shape, x.stride(), x.device

    def _object(self, x: Any) -> int:
        # What cannot be referred to weakly is known by its address alone.
        with suppress(TypeError):
            self._objects.append(weakref.ref(x))
        return id(x)


def _towers(model: nn.Module) -> set[nn.Module]:
    """Models inside a model that its language model is no part of."""
    if not isinstance(model, PreTrainedModel):
        return set()
    decoder, found, waiting = model.get_decoder(), set(), [model]
    while waiting:
        for child in waiting.pop().children():
            if isinstance(child, PreTrainedModel) and child is not decoder:
                (waiting.append if child.get_decoder() is decoder else found.add)(child)
    return found


def _switches() -> list[Any]:
    """torch's global switches that choose kernels."""
    products = torch.backends.cuda.matmul
    # Some are newer than the oldest torch that we take.
    found = [getattr(products, name, None) for name in PRODUCTS]
    return [torch.are_deterministic_algorithms_enabled(), *found]
