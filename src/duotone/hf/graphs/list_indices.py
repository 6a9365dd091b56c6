"""Indices that a model writes as Python lists, as tensors that stay on the device.

PyTorch copies a list to the device at every use, and waits, which a capture refuses. Chameleon's
`logits[:, :, image_tokens] = ...` is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


class ListIndices(TorchFunctionMode):
    """Inside, lists of ints that index a tensor become tensors, each copied once."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call `func` with kept tensors in place of lists."""
        if func in _INDEXED:
            tensor, index, *value = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(map(_is_list_of_ints, parts)):
                parts = tuple(self._on(tensor.device, x) for x in parts)
                args = (tensor, parts, *value)
        return func(*args, **(kwargs or {}))

    def _on(self, device: torch.device, part: Any) -> Any:
        if not _is_list_of_ints(part):
            return part
        key = (device, tuple(part))
        if key not in self._kept:
            self._kept[key] = torch.tensor(part, device=device)
        return self._kept[key]


def _is_list_of_ints(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(type(x) is int for x in part)
