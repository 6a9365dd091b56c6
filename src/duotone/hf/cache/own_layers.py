"""Layers that keep a state of fixed size instead of K and V: transformers' own objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

KINDS = ("conv_states", "recurrent_states")
PREFIX = "states."
# States of one layer, as `state_tensors` names them.
NAMES = {f"{kind}.0" for kind in KINDS}


def state_tensors(layer: LinearAttentionLayer) -> dict[str, Tensor]:
    """{kind.number: tensor} of the states that a layer holds."""
    return {
        f"{kind}.{number}": tensor
        for kind in KINDS
        for number, tensor in getattr(layer, kind).items()
        if tensor is not None
    }


def own_layers(cache: Cache) -> list[LinearAttentionLayer]:
    """Layers of any cache that keep a state instead of K and V."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


class OwnLayers:
    """transformers' layers of one cache, by their numbers in the model.

    A model runs them through the cache; here is what is asked of all layers of a cache alike.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.layers = {number: LinearAttentionLayer() for number in numbers}

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """{name: tensor} of all states, as files name them."""
        return {
            f"{PREFIX}{number}.{name}": tensor
            for number, layer in self.layers.items()
            for name, tensor in state_tensors(layer).items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all states; their number does not depend on the number of tokens."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, index: Tensor) -> None:
        """Pick sequences."""
        for layer in self.layers.values():
            layer.reorder_cache(index)

    def reset(self) -> None:
        """Forget all states, and the batch size that they have."""
        for layer in self.layers.values():
            layer.__init__(layer.number_of_states)

    def fill(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take over states by the names of `tensors`, as copies on a device."""
        for name, tensor in tensors.items():
            number, kind, place = name.removeprefix(PREFIX).split(".")
            layer, tensor = self.layers[int(number)], tensor.to(device)
            layer.lazy_initialization(**{kind: tensor}, state_idx=int(place))
            getattr(layer, kind)[int(place)].copy_(tensor)
            layer.has_previous_state[int(place)] = True


def taken_states(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the states out of a file's tensors."""
    return {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}


def check_states(states: Mapping[str, Tensor], numbers: Iterable[int], batch: int) -> None:
    """Raise ValueError for other states than layers with these numbers have.

    All such layers are alike, so each has states of the names, types, and shapes of the others.
    """
    found: dict[str, dict[str, Tensor]] = {str(number): {} for number in numbers}
    for name, tensor in states.items():
        number, _, rest = name.removeprefix(PREFIX).partition(".")
        if number not in found:
            raise ValueError(f"states must be of layers {sorted(found)}; got {name!r}")
        found[number][rest] = tensor
    kinds = [{name: (x.dtype, tuple(x.shape)) for name, x in own.items()} for own in found.values()]
    for number, kind in zip(found, kinds, strict=True):
        if kind != kinds[0] or set(kind) != NAMES:
            raise ValueError(
                f"layers with states must have {sorted(NAMES)}, of one shape and type in all of "
                f"them; layer {number} has {kind}, the first one {kinds[0]}"
            )
    for name, tensor in states.items():
        if not tensor.is_floating_point() or tensor.shape[:1] != (batch,):
            raise ValueError(
                f"states must be floats of {batch} sequences; {name} is of {tensor.dtype}, "
                f"{tuple(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"states must be finite; {name} is not")
