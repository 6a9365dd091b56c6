"""Units in which a cache stores keys, chosen for its quantizers from a model's weights.

A score q . k is (q / w) . (k * w) for any w per channel, and a poor w costs quality alone. An error
e of k * w is one of (q / w) . e of a score.

Quantizers that order channels by variance want errors that count alike: w is the size of q.
A range for several channels gives these equal errors: w is sqrt(size of q / size of k). By Cauchy
and Schwarz that is where |q / w| |k * w| is least.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.state_sizes import child, mean_squares, tensors_of, turned_share
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.bases import Reference

Units = Literal["queries", "balanced"]
# Keys stay as they are in layers whose largest w of a head is at most so many times the smallest.
FAR = 2.0
# The smallest w; the largest of every head is 1, so no key and no query overflows.
LEAST = 2.0**-8
# Norms whose output a layer's attention reads, by their names in the layer.
NORMS_BEFORE = ("input_layernorm", "operator_norm", "norm")
# Of each model whose weights were read: their state then, and {(number of a layer, units): w}.
Found = dict[tuple[int, Units], Tensor]
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Found]]
_FOUND = weakref.WeakKeyDictionary()


def key_scales(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> list[Tensor | None]:
    """Return w [kv_heads, 1, head_dim] of every packed layer; None where keys stay as they are.

    Keys stay where `spec` says so or compares no channels of K, and where w is nearly equal. They
    also stay where bases or shared codes belong to keys as they are, or weights cannot be read.
    """
    units = [units_of(spec, layer) for layer in range(facts.layers)]
    if facts.has_latents or not any(units):
        return [None] * facts.layers
    known = _far_scales(model, facts)
    return [known.get(pair) for pair in zip(facts.packed, units, strict=True)]


def query_scales(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> list[Tensor | None]:
    """Return w in units of queries for the layers whose keys are scaled, in any units, or in bases.

    Bases of `duotone calibrate` have channels far from others in these units.
    """
    scales = key_scales(model, facts, spec)
    seen = [w is not None or _in_bases(spec, layer) for layer, w in enumerate(scales)]
    known = _far_scales(model, facts) if any(seen) and not facts.has_latents else {}
    pairs = zip(facts.packed, seen, strict=True)
    return [known.get((number, "queries")) if is_seen else None for number, is_seen in pairs]


def units_of(spec: CacheSpec, layer: int) -> Units | None:
    """Return the units that a layer's quantizers of K want; None: keys as they are."""
    if spec.scale_keys == "never" or spec.share is not None:
        return None
    own, keys = spec.at_layer(layer), _keys(spec, layer)
    if _in_bases(spec, layer):
        return None
    if own.background is not None or any(key.classes for key in keys):
        return "queries"
    if not any(key.along != "tokens" or key.transform for key in keys):
        # A range per channel has the same codes for keys of any scale. Energies and fitted gains,
        # which all channels have a part in, gain nothing by units (dev/log/quality.md).
        return None
    # A norm of keys divides by the root of what is left of their size.
    return "queries" if own.key_norm else "balanced"


def _keys(spec: CacheSpec, layer: int) -> list[TensorSpec]:
    own = spec.at_layer(layer)
    policies = (own.visual, own.background, own.text)
    return [each.key for each in policies if isinstance(each, KVSpec)]


def _in_bases(spec: CacheSpec, layer: int) -> bool:
    return any(Reference.parse(key.transform or "") for key in _keys(spec, layer))


@torch.inference_mode(False)  # w is kept, for steps with gradients as well
@torch.no_grad()
def _far_scales(model: PreTrainedModel, facts: ModelFacts) -> Found:
    """{(number of a layer, units): w} where it is far from equal; weights are read once."""
    layers = list(_layers(model, facts))
    state = [[_state(x) for x in tensors_of(*parts)] for parts in layers]
    known = _FOUND.get(model)
    if known is None or known[0] != state:
        shapes, share = dict(zip(facts.packed, facts.shapes, strict=True)), turned_share(model)
        far: Found = {}
        for attention, norm in layers:
            given = (shapes[attention.layer_idx], share)
            query, key = (mean_squares(attention, norm, which, *given) for which in ("q", "k"))
            for units, w in _scales(query, key).items():
                if float((w.amax(-1) / w.amin(-1)).max()) > FAR:
                    far[attention.layer_idx, units] = w.to(model.dtype)
        known = _FOUND[model] = (state, far)
    return known[1]


def _layers(
    model: PreTrainedModel, facts: ModelFacts
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield the attention of each packed layer with the norm before it."""
    packed = frozenset(facts.packed)
    for layer in model.get_decoder().modules():
        for each in vars(layer)["_modules"].values():
            has_keys = each is not None and child(each, ("k_proj",)) is not None
            if has_keys and getattr(each, "layer_idx", None) in packed:
                yield each, child(layer, NORMS_BEFORE)


def _state(x: Tensor) -> tuple[Any, ...]:
    """Address of a tensor, and its changes so far, without those through `.data`.

    Inference tensors count none.
    """
    return x.data_ptr(), None if x.is_inference() else x._version, x.dtype


def _scales(query: Tensor | None, key: Tensor | None) -> dict[Units, Tensor]:
    """w by units, from mean squares [kv_heads, head_dim], the largest of a head 1."""
    found: dict[Units, Tensor] = {}
    if query is not None:
        found["queries"] = _of_largest(query.sqrt())
    if query is not None and key is not None:
        least = LEAST**2 * key.mean(-1, keepdim=True)
        found["balanced"] = _of_largest((query / key.maximum(least)).nan_to_num().sqrt().sqrt())
    return found


def _of_largest(w: Tensor) -> Tensor:
    """[kv_heads, 1, head_dim] relative to a head's largest; equal ones for a head of zeros."""
    largest = w.amax(-1, keepdim=True)
    return torch.where(largest > 0, w / largest, 1.0).clamp_min(LEAST)[:, None]
