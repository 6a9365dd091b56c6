"""Models whose keys grew by other factors in other channels: their caches scale keys."""

import torch
from transformers import PreTrainedModel

from benchmarks import stress
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.hf.model import key_scales
from duotone.hf.model.attentions import attentions
from duotone.hf.model.facts import model_facts

from families import new_model

EIGHT = TensorSpec(8, "channels", 8)
STREAM = CacheSpec(
    visual="text", text=KVSpec(EIGHT, TensorSpec(8, "channels", 8)), sink=2, recent=3
)


def grown(name: str, factor: float = 8) -> PreTrainedModel:
    """A model with keys that grew by other factors in other channels, and queries back."""
    model = new_model(name)
    stress.grow_keys(model, factor)
    for attention in attentions(model, model_facts(model)):
        stress._scale_queries_and_keys(attention, torch.tensor([1, 9]), 3.0)
    key_scales._FOUND.clear()
    return model
