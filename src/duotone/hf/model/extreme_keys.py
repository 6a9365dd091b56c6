"""Warning of layers whose K has extreme channels, read from the weights before a run.

Qwen2.5's first and last layers have biases of K that are tens of times those of other layers. A
range per channel takes one that RoPE hardly rotates in its zero-point; a range that channels share
loses all other channels.
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
from duotone.quant import CacheSpec, KVSpec

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
    places = [place for place in range(facts.layers) if _shares_range(spec, place)]
    if not places:
        return
    scales = query_scales(model, facts, spec)
    risky = {facts.packed[place]: scales[place] for place in places}
    known = _FOUND.setdefault(model, {})
    if any((number, w is not None) not in known for number, w in risky.items()):
        for each in attentions(model, facts):
            w = risky.get(each.layer_idx)
            known[each.layer_idx, w is not None] = _ratio(each, w)
    reached = {number: known.get((number, w is not None), 0.0) for number, w in risky.items()}
    found = {number: ratio for number, ratio in reached.items() if ratio > EXTREME}
    if found:
        warnings.warn(
            "K that has channels far larger than others needs a range per channel; in "
            f"{model.config.model_type!r} channels of layers {list(found)} reach "
            f"{max(found.values()):.0f} times as far as the median one, and this scheme gives them "
            "a range in common. Use along='tokens' for K, e.g. duotone.scheme('kivi', bits=2).",
            stacklevel=2,
        )


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
