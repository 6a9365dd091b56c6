"""Checks that a model and a spec go together, before any work is done."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from duotone.hf.model.calibrated import check_bases
from duotone.hf.model.extreme_keys import warn_of_extreme_keys
from duotone.hf.model.facts import ModelFacts, model_facts, with_visual
from duotone.hf.model.spec_checks import check_spec
from duotone.hf.model.support import check_window
from duotone.quant import CacheSpec


def fitting_facts(
    model: PreTrainedModel, spec: CacheSpec, visual_mask: Tensor | None = None
) -> ModelFacts:
    """The model's facts. Errors: ValueError for anything but a model that `spec` fits."""
    check_is_model(model)
    if not isinstance(spec, CacheSpec):
        raise ValueError(
            f"spec must be a CacheSpec; got {_shown(spec)}. E.g. duotone.scheme('duotone', bits=1)."
        )
    facts = checked_facts(model, visual_mask)
    # First: another model's bases explain why nothing else fits.
    check_bases(model, facts, spec)
    check_spec(with_visual(facts, visual_mask), spec)
    warn_of_extreme_keys(model, facts, spec)
    return facts


def check_is_model(model: Any) -> None:
    """Raise ValueError for anything but a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers model; got {_shown(model)}. "
            "Of a wrapper (PEFT, torch.compile, DDP), give the model inside."
        )


def checked_facts(
    model_or_config: PreTrainedModel | PreTrainedConfig, visual_mask: Tensor | None = None
) -> ModelFacts:
    """Facts of a model that some spec may fit. Errors: ValueError for an unsupported one."""
    check_visual_mask(visual_mask)
    facts = model_facts(model_or_config, visual_mask=visual_mask)
    is_model = isinstance(model_or_config, PreTrainedModel)
    if is_model and any(facts.sliding) and facts.window is not None:
        check_window(model_or_config)
    return facts


def check_visual_mask(mask: Any) -> None:
    """Raise ValueError for what is no mask [batch, tokens]."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return
    got = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else _shown(mask)
    raise ValueError(
        f"visual_mask must be a tensor [batch, tokens], True at visual tokens; got {got}."
    )


def _shown(thing: Any) -> str:
    """A short text as it is, of anything else the type."""
    is_short = isinstance(thing, str) and len(thing) < 50
    return repr(thing) if thing is None or is_short else f"a {type(thing).__name__}"
