"""Implementations of a model's decode attention: checked before a run, warned of once."""

from __future__ import annotations

import weakref

from transformers import PreTrainedModel

from duotone.attention import IMPLEMENTATIONS, Plan, Shape, resolve_layers
from duotone.attention.plan import alike
from duotone.attention.triton.family import no_triton
from duotone.hf.model.facts import ModelFacts
from duotone.quant import CacheSpec
from duotone.tools.slow_paths import SlowPaths

_SAID: weakref.WeakKeyDictionary[PreTrainedModel, SlowPaths] = weakref.WeakKeyDictionary()


def slow_paths(model: PreTrainedModel) -> SlowPaths:
    """Warnings of a model's caches so far."""
    return _SAID.setdefault(model, SlowPaths())


def planned_layers(
    model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec, impl: str
) -> list[Plan]:
    """Plan the attention of every layer.

    Errors: ValueError for an unknown `impl`, and for one that cannot read every token.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}; got {impl!r}.")
    if impl == "triton" and (missing := no_triton(model.device)):
        raise ValueError(f"impl='triton' is not possible: {missing}. Use impl='auto'.")
    if (why := facts.against_kernels) and impl in ("triton", "cuda"):
        raise ValueError(f"impl={impl!r} is not possible: {why}. Use impl='auto'.")
    impl = "reference" if why else impl
    shapes = [Shape(x.head_dim, x.q_heads, x.kv_heads, model.dtype) for x in facts.shapes]
    plans = resolve_layers(spec, facts.sliding, shapes, model.device, impl)
    for layers, plan in alike(plans) if impl == "cuda" else ():
        for name, reason in plan.reasons.items():
            if reason is not None:
                where = "" if len(layers) == facts.layers else f" of layers {layers}"
                raise ValueError(
                    f"impl='cuda' is not possible for {name} tokens{where}: {reason}. "
                    "Use impl='auto'."
                )
    return plans
