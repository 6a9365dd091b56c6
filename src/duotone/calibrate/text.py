"""Text and answers beside calibrated pictures: the text half of another scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duotone.hf.model.spec_checks import check_spec
from duotone.quant import CacheSpec, KVSpec

from .moments import CalibrationBatch, facts_of


def check_text(spec: CacheSpec) -> None:
    """Raise ValueError for schemes whose text cannot stand beside pictures of another scheme."""
    if not isinstance(spec.text, KVSpec):
        raise ValueError(
            f"text beside pictures must be of a scheme that quantizes text, got {spec.text!r}; "
            "take duotone-mixed@4, or leave --text out for 16 bit"
        )
    if any(rule.text is not None for rule in spec.layers):
        raise ValueError(
            "text beside pictures must have one quantizer in all layers, got rules for layers; "
            "take a scheme without them, e.g. duotone-mixed@4"
        )
    if spec.share is not None:
        raise ValueError(
            f"text beside pictures must have codes of its own in all layers, got {spec.share}; "
            "take a scheme without shared codes, e.g. duotone-mixed@4"
        )


def check_has_pictures(model: Any, batches: Sequence[CalibrationBatch], spec: CacheSpec) -> None:
    """Raise ValueError for a model without pictures, or one that cannot have this text."""
    facts = facts_of(model, batches)
    if not facts.is_multimodal:
        raise ValueError(
            f"text beside pictures needs a model with pictures, got {facts.model_type!r}, whose "
            "text is calibrated itself; leave --text out"
        )
    check_spec(facts, spec)
