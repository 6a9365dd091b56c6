"""Calibrated bases belong to one model: whether it is this one."""

from __future__ import annotations

from itertools import cycle

from transformers import PreTrainedModel

from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.fingerprint import fingerprint
from duotone.quant import CacheSpec
from duotone.quant.bases import Reference, bases, check_unchanged


def check_bases(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise ValueError where a spec's calibrated bases are another model's or another tensor's."""
    # Every key is followed by its value.
    named = [
        (reference, which)
        for tensor, which in zip(spec.tensors, cycle(("key", "value")), strict=False)
        if (reference := Reference.parse(tensor.transform or "")) is not None
    ]
    for file in {reference.file for reference, _ in named}:
        check_unchanged(file)
        theirs, ours = str(bases(file).header.get("fingerprint")), fingerprint(model)
        if theirs != ours:
            raise ValueError(
                f"the calibrated bases {file!r} belong to a model with fingerprint {theirs[:12]}; "
                f"this one, {facts.model_type!r}, has {ours[:12]}. Make yours: duotone calibrate."
            )
    for reference, which in named:
        _check_shape(facts, reference, which)


def basis_digests(spec: CacheSpec) -> dict[str, str]:
    """{file: digest of its content} of all calibrated bases that a spec names."""
    named = [Reference.parse(tensor.transform or "") for tensor in spec.tensors]
    return {reference.file: bases(reference.file).digest for reference in named if reference}


def _check_shape(facts: ModelFacts, reference: Reference, which: str) -> None:
    """Raise where a file's bases are not of the model's shape, or of the other tensor."""
    if reference.which != which:
        raise ValueError(
            f"a basis of the {reference.which} cannot serve the {which}; got {reference}."
        )
    every = getattr(bases(reference.file), which)
    shape = facts.shape
    wanted = (facts.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
    if tuple(every.shape) != wanted or reference.layer >= facts.layers:
        raise ValueError(
            f"{reference} needs bases of (layers, kv_heads, head_dim, head_dim) = {wanted}; the "
            f"file has {tuple(every.shape)}."
        )
