"""Layers that stay transformers' own: states of fixed size, and windows of the latest tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from duotone.hf.cache.windows import RingPlaces, WindowLayer
from duotone.hf.model.facts import ModelFacts


class CrossLayer(DynamicLayer):
    """K and V of pictures, in 16 bit, for a layer that attends to nothing else."""


OwnLayer = LinearAttentionLayer | DynamicSlidingWindowLayer | CrossLayer
KINDS = ("conv_states", "recurrent_states")
WINDOW_KINDS = ("keys", "values")
PREFIX, OF_PLACES = "states.", "places."


def state_tensors(layer: OwnLayer) -> dict[str, Tensor]:
    """{kind.number: tensor} of the states, or of K and V, that a layer holds."""
    if isinstance(layer, DynamicLayer):
        return {f"{kind}.0": getattr(layer, kind) for kind in WINDOW_KINDS if layer.is_initialized}
    return {
        f"{kind}.{number}": tensor
        for kind in KINDS
        for number, tensor in getattr(layer, kind).items()
        if tensor is not None
    }


def own_layers(cache: Cache) -> list[OwnLayer]:
    """Layers of any cache that keep a state instead of K and V, or a window of them."""
    return [layer for layer in cache.layers if isinstance(layer, OwnLayer)]


class OwnLayers:
    """transformers' layers of one cache, by their numbers in the model.

    A model runs them through the cache; here is what is asked of all layers of a cache alike.
    """

    def __init__(self, facts: ModelFacts) -> None:
        # transformers 5.17 knows one state of a kind per layer.
        more = {"number_of_states": facts.conv_states} if facts.conv_states > 1 else {}
        self.states = {number: LinearAttentionLayer(**more) for number in facts.states}
        self.windows = {n: WindowLayer(facts.window) for n in facts.windows}
        self.crosses = {number: CrossLayer() for number in facts.crosses}
        self.is_chunked, self.places = facts.is_chunked, None
        # transformers 5.17 has no class for them and takes one whose states are never set.
        empty = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
        self.empty = {number: empty() for number in (*facts.empty, *facts.readers)}
        self.layers = {**self.states, **self.windows, **self.crosses, **self.empty}

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """{name: tensor} of all states and windows, as files have them.

        Tokens that a window has recorded for a `crop` are not among them.
        """
        layers = {**self.states, **self.crosses}
        found = {number: state_tensors(layer) for number, layer in layers.items()}
        for number, layer in self.windows.items():
            last = slice(1 - layer.sliding_window, None)
            found[number] = {name: x[:, :, last] for name, x in state_tensors(layer).items()}
        return {f"{PREFIX}{n}.{name}": x for n, own in found.items() for name, x in own.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all states and windows, with what windows have recorded."""
        return sum(x.nbytes for x in self.held.values())

    @property
    def held(self) -> dict[str, Tensor]:
        """{name: tensor} of everything that is held, in the form that it has now."""
        layers = {**self.states, **self.windows, **self.crosses}
        found = {
            f"{PREFIX}{number}.{name}": x
            for number, layer in layers.items()
            for name, x in state_tensors(layer).items()
        }
        places = {} if self.places is None else self.places.tensors
        return found | {OF_PLACES + name: x for name, x in places.items()}

    def check_length(self, length: int) -> None:
        """Raise RuntimeError where windows have not seen exactly the tokens of the cache."""
        for number, layer in self.windows.items():
            if layer.cumulative_length != length:
                raise RuntimeError(
                    f"layer {number} has seen {layer.cumulative_length} tokens and the cache "
                    f"{length}, so the cache is not consistent any more. Start again with a new "
                    "cache."
                )

    def release(self) -> None:
        """Let go of gradients, of a whole prompt that a window is a view of, of inference mode.

        Later steps write into states, which torch allows for tensors of that mode only inside it.
        """
        for layer in (*self.windows.values(), *self.crosses.values()):
            for kind in WINDOW_KINDS if layer.is_initialized else ():
                tensor = getattr(layer, kind).detach()
                is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
                setattr(layer, kind, tensor.clone() if is_part else tensor)
        with torch.inference_mode(False), torch.no_grad():
            for states in (
                getattr(layer, kind) for layer in self.states.values() for kind in KINDS
            ):
                for place, x in states.items():
                    if x is not None and x.is_inference():
                        states[place] = x.clone()
                    elif x is not None and x.requires_grad:
                        states[place] = x.detach()

    def check_crop(self, count: int) -> None:
        """Raise NotImplementedError where `count` tokens cannot be taken out again."""
        if self.states:
            raise NotImplementedError(
                "no token can be taken out of a state again, and layers of this model keep one. "
                "Begin again with a new cache."
            )
        for number, layer in self.windows.items():
            left = min(layer.cumulative_length - count, layer.sliding_window - 1)
            if layer.keys.shape[2] - count < left or _forgets(layer):
                raise NotImplementedError(
                    f"layer {number} has a window of {layer.sliding_window} tokens, and older "
                    "ones, which would enter it again, are gone. Call activate_past_recording() "
                    "of the cache before the steps that may be taken back."
                )

    def crop(self, count: int) -> None:
        """Forget the last tokens, as `check_crop` allows it."""
        for layer in self.windows.values():
            layer.crop(-count)

    def trim(self) -> None:
        """Let go of what windows have recorded since the last crop, as transformers' `crop(0)`."""
        for layer in self.windows.values():
            if layer.record_past and layer.is_initialized:
                layer.crop(0)

    def rows(self, index: Tensor) -> None:
        """Pick sequences."""
        for layer in self.layers.values():
            layer.reorder_cache(index)

    def reset(self) -> None:
        """Forget all states and windows, and the batch size that they have."""
        for layer in self.states.values():
            layer.__init__(layer.number_of_states)
        for layer in self.windows.values():
            layer.__init__(layer.sliding_window)
            layer.places = None
        for layer in self.crosses.values():
            layer.__init__()
        self.places = None

    def check_freezes(self) -> None:
        """Raise ValueError where a decode step would replace states instead of writing them."""
        layers = {**self.states, **self.windows}
        if recording := [number for number, layer in layers.items() if layer.record_past]:
            raise ValueError(
                f"fixed buffers need states of fixed size; layers {recording} record their "
                "past for a crop. Decode in buffers that grow."
            )

    def hold_still(self, real: Tensor) -> dict[str, Tensor]:
        """Let each step write in place; returns {name: tensor} of all that steps write.

        real: [batch, tokens] False at padding.
        """
        self.release()
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.windows.values():
                self.places = self.places or RingPlaces(real, layer.sliding_window, self.is_chunked)
                layer.hold_still(self.places)
        return self.held

    def advance(self) -> None:
        """Begin a step that writes in place."""
        if self.places is not None:
            self.places.advance()

    def thaw(self, length: int) -> None:
        """Let windows grow again, after `length` tokens."""
        self.places = None
        for layer in self.windows.values():
            layer.thaw(length)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on in these tensors, named as in `held`, of another cache."""
        for name, tensor in tensors.items():
            if name.startswith(OF_PLACES):
                setattr(self.places, name.removeprefix(OF_PLACES), tensor)
                continue
            number, kind, place = name.removeprefix(PREFIX).split(".")
            layer = self.layers[int(number)]
            if kind in WINDOW_KINDS:
                setattr(layer, kind, tensor)
            else:
                getattr(layer, kind)[int(place)] = tensor

    def fill(self, tensors: Mapping[str, Tensor], length: int, device: torch.device) -> None:
        """Take over what `tensors` names, as copies on a device. length: tokens of the cache."""
        for name, tensor in tensors.items():
            number, kind, place = name.removeprefix(PREFIX).split(".")
            layer, tensor = self.layers[int(number)], tensor.to(device)
            if kind in WINDOW_KINDS:
                if not layer.is_initialized:
                    layer.lazy_initialization(tensor, tensor)
                setattr(layer, kind, tensor.clone())
                layer.cumulative_length = length
                continue
            layer.lazy_initialization(**{kind: tensor}, state_idx=int(place))
            getattr(layer, kind)[int(place)].copy_(tensor)
            layer.has_previous_state[int(place)] = True


def _forgets(layer: DynamicSlidingWindowLayer) -> bool:
    """True where transformers crops no more: the window was full, and nothing recorded."""
    return layer.cumulative_length >= layer.sliding_window and not layer.record_past


def taken_states(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the states and windows out of a file's tensors."""
    return {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}


def check_states(states: Mapping[str, Tensor], facts: ModelFacts, batch: int, length: int) -> None:
    """Raise ValueError for other states and windows than this model's layers have.

    All layers with states are alike, so each has tensors of the names, types, and shapes of the
    others. A window has the shape of its own layer.
    """
    numbers = (*facts.states, *facts.windows, *facts.crosses)
    found: dict[str, dict[str, Tensor]] = {str(number): {} for number in numbers}
    for name, tensor in states.items():
        number, _, rest = name.removeprefix(PREFIX).partition(".")
        if number not in found:
            raise ValueError(f"states must be of layers {sorted(found)}; got {name!r}")
        found[number][rest] = tensor
    has_pictures = any(found[str(n)] for n in facts.crosses)
    crosses = facts.crosses if has_pictures else ()
    own = (
        (facts.states, facts.state_kinds),
        (facts.windows, WINDOW_KINDS),
        (crosses, WINDOW_KINDS),
    )
    for numbers, kinds in own:
        names = {f"{kind}.0" for kind in kinds}
        _check_alike({n: found[str(n)] for n in numbers}, names, sized=kinds != WINDOW_KINDS)
    for name, tensor in states.items():
        if not tensor.is_floating_point() or tensor.shape[:1] != (batch,):
            raise ValueError(
                f"states must be floats of {batch} sequences; {name} is of {tensor.dtype}, "
                f"{tuple(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"states must be finite; {name} is not")
    _check_windows([found[str(n)] for n in facts.windows], facts, length)


def _check_alike(found: Mapping[int, dict[str, Tensor]], names: set[str], sized: bool) -> None:
    """Raise for layers of other names or types, or where `sized` of other shapes."""
    kinds = [
        {name: (x.dtype, tuple(x.shape) if sized else ()) for name, x in own.items()}
        for own in found.values()
    ]
    for number, kind in zip(found, kinds, strict=True):
        if kind != kinds[0] or set(kind) != names:
            raise ValueError(
                f"layers with states must have {sorted(names)}, of one shape and type in all of "
                f"them; layer {number} has {kind}, the first one {kinds[0]}"
            )


def _check_windows(found: Sequence[dict[str, Tensor]], facts: ModelFacts, length: int) -> None:
    for number, shape, own in zip(facts.windows, facts.window_shapes, found, strict=True):
        wanted = (shape.kv_heads, min(length, facts.window - 1), shape.head_dim)
        for name, tensor in own.items():
            if tuple(tensor.shape[1:]) != wanted:
                raise ValueError(
                    f"a window after {length} tokens must hold (kv_heads, tokens, head_dim) "
                    f"{wanted}; layer {number} has {tuple(tensor.shape[1:])} in {name}"
                )
