"""Calibrated bases belong to one model: whether it is this one."""

from __future__ import annotations

from itertools import cycle

from transformers import PreTrainedModel

from duotone.hf.facts import ModelFacts
from duotone.hf.fingerprint import fingerprint
from duotone.quant import CacheSpec
from duotone.quant.bases import Reference, bases


def check_bases(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise ValueError where a spec's calibrated bases are another model's or another tensor's."""
    files: set[str] = set()
    # Every key is followed by its value.
    for tensor, which in zip(spec.tensors, cycle(("key", "value")), strict=False):
        files |= _file_of(facts, tensor.transform, which)
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
