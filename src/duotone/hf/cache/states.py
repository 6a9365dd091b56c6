"""States that `update()` of a layer returns in the place of K and V.

Our attention function reads `.layer` and `.new`. States of a growing cache are tensors with the
logical shape of K or V and no storage. Any other operation dequantizes them, so a foreign attention
function computes the right thing, only slowly. States of fixed buffers are no tensors: a compiler
sees through them, and another attention function fails on them by their type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from duotone.hf.cache.layer import QuantizedLayer


class LazyStates(Tensor):
    """K or V of one layer after one step, [batch, kv_heads, logical tokens, head_dim].

    new: this step's dense states. Padding decodes to zeros; the model's mask hides it.
    """

    layer: QuantizedLayer
    which: Literal["key", "value"]
    new: Tensor

    @staticmethod
    def __new__(  # noqa: D102 -- the class docstring says it
        cls, layer: QuantizedLayer, which: str, new: Tensor
    ) -> LazyStates:
        batch, heads, _, dim = new.shape
        shape = (batch, heads, layer.get_seq_length(), dim)
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        lazy.layer, lazy.which, lazy.new = layer, which, new
        return lazy

    def __init__(self, layer: QuantizedLayer, which: str, new: Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyStates({self.which}, {tuple(self.shape)}, layer {self.layer.index})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def dense(value: Any) -> Any:
            if not isinstance(value, LazyStates):
                return value
            return value.layer.for_foreign(value.which, value.new)

        with torch.no_grad():
            args, kwargs = tree_map(dense, (args, kwargs or {}))
        return func(*args, **kwargs)


class StaticStates:
    """K or V of one layer: `new` are this step's states, the rest is in the layer.

    Another attention function fails on it by its type.
    """

    def __init__(self, layer: QuantizedLayer, new: Tensor) -> None:
        self.layer, self.new = layer, new

    @property
    def shape(self) -> torch.Size:
        """Shape of this step's states: a frozen cache has its length on the device."""
        return self.new.shape
