"""Layers whose K has extreme channels, read from the weights before a run.

Qwen2.5's first and last layers have biases of K that are tens of times those of other layers. A
range per channel takes one that RoPE hardly rotates in its zero-point, or in the middle of its
levels. Of 8 bits, that middle is off by up to 1/32: such layers have parameters of 16 bits instead.
A range that channels share loses all other channels, which is warned of.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.attentions import attentions, is_readable
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.key_scales import query_scales
from duotone.quant import CacheSpec, KVSpec, LayerRule
from duotone.quant.layer_rules import RULED

# Times as far as the median channel of a head.
EXTREME = 10.0
SPREADS = 3.0
# Of each model whose weights were read: {(number of a layer, True where its keys are scaled): how
# far its largest channel reaches}.
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[int, bool], float]]
_FOUND = weakref.WeakKeyDictionary()


def warn_of_extreme_keys(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> None:
    """Warn of layers with extreme keys where `spec` gives several channels of K one range.

    Keys that are scaled are extreme if they are so to queries.
    """
    shared = [place for place in range(facts.layers) if _shares_range(spec, place)]
    found = {facts.packed[p]: ratio for p, ratio in _extreme(model, facts, spec, shared).items()}
    if found:
        warnings.warn(
            "K that has channels far larger than others needs a range per channel; in "
            f"{model.config.model_type!r} channels of layers {list(found)} reach "
            f"{max(found.values()):.0f} times as far as the median one, and this scheme gives them "
            "a range in common. Use along='tokens' for K, e.g. duotone.scheme('kivi', bits=2).",
            stacklevel=2,
        )


def with_wide_parameters(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> CacheSpec:
    """Spec with parameters of 16 bits, K's and V's, in layers whose keys are extreme.

    Layers with parameters of 16 bits stay as they are, so a spec that was so changed stays equal.
    """
    small = [place for place in range(facts.layers) if _small_policies(spec, place)]
    wide = [
        LayerRule(place, place + 1, **_wide_policies(spec, place))
        for place in _extreme(model, facts, spec, small)
    ]
    return spec.replace(layers=(*spec.layers, *wide)) if wide else spec


def _extreme(
    model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec, places: list[int]
) -> dict[int, float]:
    """{place: reach} of those packed layers whose keys are extreme."""
    if not places:
        return {}
    scales = query_scales(model, facts, spec)
    risky = {facts.packed[place]: scales[place] for place in places}
    known = _FOUND.setdefault(model, {})
    if any((number, w is not None) not in known for number, w in risky.items()):
        for each in attentions(model, facts):
            w = risky.get(each.layer_idx)
            known[each.layer_idx, w is not None] = _ratio(each, w)
    numbers = [(facts.packed[place], scales[place] is not None) for place in places]
    reached = zip(places, (known.get(number, 0.0) for number in numbers), strict=True)
    return {place: ratio for place, ratio in reached if ratio > EXTREME}


def _small_policies(spec: CacheSpec, layer: int) -> dict[str, KVSpec]:
    """{name: policy} of those of a layer whose K has parameters of 8 bits."""
    own = spec.at_layer(layer)
    policies = {name: getattr(own, name) for name in RULED}
    return {
        name: each
        for name, each in policies.items()
        if isinstance(each, KVSpec) and each.key.param_dtype == "float8"
    }


def _wide_policies(spec: CacheSpec, layer: int) -> dict[str, KVSpec]:
    """`_small_policies` in 16 bits."""
    return {
        name: KVSpec(*(x.replace(param_dtype="float16") for x in (each.key, each.value)))
        for name, each in _small_policies(spec, layer).items()
    }


def _shares_range(spec: CacheSpec, layer: int) -> bool:
    own = spec.at_layer(layer)
    policies = (own.visual, own.background, own.text)
    return any(isinstance(each, KVSpec) and each.key.along == "channels" for each in policies)


@torch.no_grad()
def _ratio(attention: nn.Module, scale: Tensor | None = None) -> float:
    """Reach of a head's largest channel of K, in reaches of its median one; 0 where unknown."""
    reach, head_dim = _reach(attention), getattr(attention, "head_dim", None)
    if reach is None or not head_dim or reach.numel() % head_dim:
        return 0.0
    heads = reach.float().view(-1, head_dim)
    if scale is not None:
        heads = heads * scale[:, 0]
    return float((heads.amax(1) / heads.median(1).values.clamp_min(1e-9)).max())


def _reach(attention: nn.Module) -> Tensor | None:
    """|mean| + three spreads of every channel of K before RoPE, for inputs of unit variance."""
    norm, linear = getattr(attention, "k_norm", None), attention.k_proj
    weight = getattr(linear if norm is None else norm, "weight", None)
    if not is_readable(weight):
        return None
    if norm is not None:  # its output for +1, -1, +1, ...: some norms add 1 to their weight
        signs = torch.ones_like(weight)
        signs.view(-1)[1::2] = -1
        return SPREADS * norm(signs).abs()
    wide = torch.promote_types(weight.dtype, torch.float32)
    spreads = SPREADS * torch.linalg.vector_norm(weight, dim=1, dtype=wide)
    return spreads if linear.bias is None else spreads + linear.bias.abs()
