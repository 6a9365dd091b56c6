"""Identity of a model: the configuration and the weights that its numbers follow from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from duotone.hf.model.fingerprint import lasting
from duotone.hf.model.module_facts import adapter_facts
from duotone.tools.digest import digest

# What says how a model is called, run or trained, and changes no K and V.
UNRELATED = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "experts_implementation",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
    }
)
Config = dict[str, Any]
ROUNDED = 2e-6  # how far one device's powers and sines of float32 are from another's, relatively
SAMPLED = 64  # numbers of a tensor that are looked at to see a change
_KNOWN: WeakKeyDictionary[PreTrainedModel, tuple[Any, str]] = WeakKeyDictionary()


def config_facts(model: PreTrainedModel) -> Config:
    """{dotted name: value} of the configuration's fields, but for unrelated ones and None.

    A field that a later transformers adds makes another configuration, unless it is None.
    """
    data = json.loads(json.dumps(lasting(model.config.to_dict()), default=str))
    return dict(_flat(data, ""))


def _flat(data: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for name, value in sorted(data.items()):
        if isinstance(value, Mapping) and name not in UNRELATED:
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None and name not in UNRELATED:
            found.append((prefix + name, value))
    return found


def config_differences(saved: Config, ours: Config) -> list[str]:
    """Every field in which two configurations differ: "name: saved -> ours"."""
    names = sorted(saved.keys() | ours.keys())
    absent = "(none)"
    return [
        f"{name}: {_short(saved.get(name, absent))} -> {_short(ours.get(name, absent))}"
        for name in names
        if not _is_same(saved.get(name, absent), ours.get(name, absent))
    ]


def _is_same(saved: Any, ours: Any) -> bool:
    """True for equal values, and for lists of numbers that differ as devices round them."""
    if isinstance(saved, list) and isinstance(ours, list) and len(saved) == len(ours):
        return all(_is_same(*pair) for pair in zip(saved, ours, strict=True))
    if type(saved) is type(ours) is float:
        return math.isclose(saved, ours, rel_tol=ROUNDED)
    return saved == ours


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of every parameter and persistent buffer that is in memory, whole.

    Where the model has PEFT adapters, their names, scalings and state belong to it.
    The same on all devices; another one for another number type. It reads all weights once and is
    remembered until a tensor moves, counts a change, or shows one in a sample of its numbers. In a
    model that was read, only an edit through `.data` of numbers outside the sample goes unseen.
    """
    tensors = {name: t for name, t in _tensors(model).items() if not t.is_meta}
    adapters = adapter_facts(model)
    state = (_places(tensors), digest(_sample(tensors)), adapters)
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        header = {"adapters": adapters} if adapters else None
        known = _KNOWN[model] = (state, digest(tensors, header))
    return known[1]


def is_in_memory(model: PreTrainedModel) -> bool:
    """True where `weights_digest` is of all weights."""
    return not any(tensor.is_meta for tensor in _tensors(model).values())


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    tensors = model.state_dict(keep_vars=True)
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}


def _places(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    """Address of each tensor, and its changes so far; inference tensors do not count these."""
    counts = [0 if t.is_inference() else t._version for t in tensors.values()]
    return [
        (name, t.data_ptr(), count, t.dtype, tuple(t.shape))
        for (name, t), count in zip(tensors.items(), counts, strict=True)
    ]


def _sample(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: t.detach().flatten()[:: max(1, t.numel() // SAMPLED)] for name, t in tensors.items()
    }
