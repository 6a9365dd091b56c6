"""Attention modules of a language model, and which of their weights can be read."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.facts import ModelFacts


def attentions(model: PreTrainedModel, facts: ModelFacts) -> list[nn.Module]:
    """Attention modules of the language model, in the order of the layers that a spec counts."""
    modules = model.get_decoder().modules()
    found = [m for m in modules if hasattr(m, "k_proj") and hasattr(m, "layer_idx")]
    return [m for m in found if m.layer_idx in facts.packed]


def is_readable(weight: object) -> bool:
    """True for plain floats that are here; False for codes, fp8 without its scales, and offloading.

    Tensors of quantizers are subclasses that may know neither a norm nor an absolute value.
    """
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return False
    return weight.is_floating_point() and weight.itemsize > 1
