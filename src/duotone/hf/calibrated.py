"""Calibrated bases belong to one model: which one, and whether it is this one."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedModel

from duotone.hf.facts import ModelFacts
from duotone.quant import CacheSpec, KVSpec
from duotone.quant.bases import Reference, bases

# What a config says of how and by whom it was saved, not of the model.
VOLATILE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of a model's config and of its weights' names and shapes, not of their numbers."""
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    config = _lasting(json.loads(model.config.to_json_string(use_diff=False)))
    text = json.dumps([config, shapes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lasting(config: object) -> object:
    if isinstance(config, dict):
        return {k: _lasting(v) for k, v in config.items() if k not in VOLATILE}
    return [_lasting(v) for v in config] if isinstance(config, list) else config


def check_bases(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise ValueError where a spec's calibrated bases are another model's or another tensor's."""
    policies = (spec.visual, spec.text, *(p for r in spec.layers for p in (r.visual, r.text)))
    files = set()
    for policy in policies:
        if isinstance(policy, KVSpec):
            for which in ("key", "value"):
                files |= _file_of(facts, getattr(policy, which).transform, which)
    for file in files:
        theirs, ours = bases(file).header.get("fingerprint"), fingerprint(model)
        if theirs != ours:
            raise ValueError(
                f"the calibrated bases {file!r} belong to a model with fingerprint {theirs}; this "
                f"one, {facts.model_type!r}, has {ours}. Make them with duotone calibrate."
            )


def _file_of(facts: ModelFacts, transform: str | None, which: str) -> set[str]:
    """The file that a transform names, or none; its bases must have the model's shape."""
    reference = Reference.parse(transform or "")
    if reference is None:
        return set()
    if reference.which != which:
        raise ValueError(
            f"a basis of the {reference.which} cannot serve the {which}; got {transform!r}."
        )
    every = getattr(bases(reference.file), which)
    wanted = (facts.layers, facts.kv_heads, facts.head_dim, facts.head_dim)
    if tuple(every.shape) != wanted or reference.layer >= facts.layers:
        raise ValueError(
            f"{transform!r} needs bases of (layers, kv_heads, head_dim, head_dim) = {wanted}; the "
            f"file has {tuple(every.shape)}."
        )
    return {reference.file}
