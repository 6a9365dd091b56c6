"""Layers that read other layers' codes of V although other channels of theirs are large."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.affine import exchanged_groups
from duotone.quant.checks import checked

# The last tokens of a prompt are compared. So large a share of a layer's groups may be wrong.
COMPARED, MOST_WRONG = 32, 0.01


class SharedValues:
    """Compare V of layers that share its codes, once, in the first prompt that is long enough.

    Codes of another layer put small numbers of a group at its other end. Where a few large channels
    make a group wide, that is far more than the numbers are (`quant.affine.exchanged_groups`).
    """

    def __init__(self, spec: CacheSpec, depth: int) -> None:
        sources = {layer: spec.source("value", layer, depth) for layer in range(depth)}
        readers = {layer: source for layer, source in sources.items() if source != layer}
        self._pairs = [
            (layer, source, tensor)
            for layer, source in readers.items()
            if (tensor := _along_channels(spec, layer)) is not None
        ]
        self._values: dict[int, Tensor] = {}

    def take(self, layer: int, value: Tensor) -> None:
        """Keep a few tokens of V [batch, kv_heads, tokens, head_dim] of one layer's step."""
        if value.shape[2] < COMPARED or not checked():
            return
        if any(layer in pair[:2] for pair in self._pairs):
            self._values[layer] = value[:, :, -COMPARED:].detach().clone()

    def warn(self) -> None:
        """Warn of layers whose V is wrong. The host waits for the device, once."""
        values, self._values = self._values, {}
        if not all(layer in values for pair in self._pairs for layer in pair[:2]):
            return
        pairs, self._pairs = self._pairs, []
        shares = [exchanged_groups(values[i], values[source], spec) for i, source, spec in pairs]
        wrong = torch.stack(shares).tolist() if shares else []
        layers = [i for (i, *_), share in zip(pairs, wrong, strict=True) if share > MOST_WRONG]
        if layers:
            warnings.warn(
                "layers should share codes of V only if the same channels of it are large; got "
                f"layers {layers}, whose large channels are not those of the layers whose codes "
                "they read: their V is far off. Let layers keep their codes of V: "
                "spec.replace(share=spec.share.replace(value=None)).",
                stacklevel=2,
            )


def _along_channels(spec: CacheSpec, layer: int) -> TensorSpec | None:
    text = spec.at_layer(layer).text
    return text.value if isinstance(text, KVSpec) and text.value.along == "channels" else None
