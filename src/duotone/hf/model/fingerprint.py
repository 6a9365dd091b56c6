"""Fingerprints of models, by configuration and shapes of weights, not by name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

# What says how a model was stored or is run, not what it is.
VOLATILE = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation"}
)


def lasting(value: Any) -> Any:
    """A configuration without volatile and private fields, at any depth."""
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in VOLATILE and str(k)[:1] != "_"}
        return {name: lasting(v) for name, v in kept.items()}
    return [lasting(v) for v in value] if isinstance(value, (list, tuple)) else value


def fingerprint(model: Any) -> str:
    """A digest of the configuration and of names and shapes of the language model's parameters.

    The same for all folders, number types and devices; weights are not read.
    """
    decoder: nn.Module = model.get_decoder()
    data = {
        "config": lasting(model.config.to_dict()),
        "parameters": {name: list(p.shape) for name, p in decoder.named_parameters()},
    }
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> bytes:
    """The elements as they lie in memory, of any dtype and on any device."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
