"""Indices and values that a model writes as Python lists and numbers, as tensors of the device.

PyTorch copies them to the device at every use, and waits, which a capture refuses. Chameleon's
`logits[:, :, image_tokens] = torch.finfo(logits.dtype).min` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class HostValues(TorchFunctionMode):
    """Inside, lists of ints that index a tensor become tensors, each copied once.

    So do numbers that are put at places of such lists, or of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call `func` with kept tensors in place of values of the host."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            tensor, index, *value = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(_is_list(part) or isinstance(part, Tensor) for part in parts):
                parts = tuple(self._index(tensor, part) for part in parts)
                value = [self._number(tensor, x) for x in value]
                args = (tensor, parts, *value)
        return func(*args, **(kwargs or {}))

    def _index(self, tensor: Tensor, part: Any) -> Any:
        return self._on(tensor.device, torch.long, part) if _is_list(part) else part

    def _number(self, tensor: Tensor, value: Any) -> Any:
        is_number = type(value) in (bool, int, float)
        return self._on(tensor.device, tensor.dtype, value) if is_number else value

    def _on(self, device: torch.device, dtype: torch.dtype, value: Any) -> Tensor:
        key = (device, dtype, tuple(value) if isinstance(value, list) else value)
        if key not in self._kept:
            self._kept[key] = torch.tensor(value, dtype=dtype, device=device)
        return self._kept[key]


def _is_list(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(type(x) is int for x in part)
