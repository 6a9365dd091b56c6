"""Checks that a spec does something on a model, and that the model allows it: by facts alone.

`fitting` is the door: it asks the model itself, too.
"""

from __future__ import annotations

from itertools import cycle

from duotone.hf.model.facts import ModelFacts
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.classes import class_counts
from duotone.quant.honours import check_honoured


def check_spec(facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise ValueError if `spec` does not fit this model or would do nothing on it."""
    check_honoured(spec)
    spec.check_depth(facts.layers)
    for head_dims in {shape.head_dims for shape in facts.shapes}:
        # Quantizers of K and of V in turn.
        for tensor, head_dim in zip(spec.tensors, cycle(head_dims), strict=False):
            _check_channels(head_dim, tensor)
    _check_kernels(facts, spec)
    _check_unequal(facts, spec)
    touches_text = isinstance(spec.text, KVSpec)
    if not facts.is_multimodal and not touches_text and isinstance(spec.visual, KVSpec):
        raise ValueError(
            f"this scheme quantizes visual tokens only, and {facts.model_type!r} has none. "
            "Choose a scheme with a text policy, e.g. duotone.scheme('kivi', bits=2)."
        )
    if not facts.is_multimodal and spec.evict is not None and spec.evict.which == "visual":
        raise ValueError(
            f"this scheme evicts visual tokens only, and {facts.model_type!r} has none. "
            "Use Eviction(which='all')."
        )
    if spec.background is not None and any(facts.sliding):
        raise ValueError(
            "spans with a background can only be seen as a whole, and sliding windows hide parts "
            f"of them; {facts.model_type!r} has such layers. Use a scheme without a background."
        )
    if spec.visual == "text" and not touches_text:
        raise ValueError(
            "visual='text' needs a text policy to join; got text='dense'. "
            "Use visual='dense', or give text a KVSpec."
        )


def _check_channels(head_dim: int, tensor: TensorSpec) -> None:
    """Raise where channels do not come out in whole groups or classes."""
    class_counts(tensor, head_dim)
    group = tensor.group or head_dim
    if tensor.along == "channels" and head_dim % group and group % head_dim:
        raise ValueError(
            f"a group along channels must divide head_dim, which is {head_dim} in this model; got "
            f"group={group}. Use a divisor, or None for the whole head."
        )


def _check_kernels(facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise for schemes that need attention of ours, where latents or capped scores forbid it."""
    if facts.softcap is not None and (spec.tau is not None or spec.evict is not None):
        what = "calibrates scores (tau)" if spec.tau is not None else "evicts tokens by scores"
        raise ValueError(
            f"a scheme that {what} does not cap them, as {facts.model_type!r} does. Use another "
            "scheme, e.g. duotone.scheme('kivi', bits=2)."
        )
    if facts.is_indexed and spec.evict is not None:
        raise ValueError(
            f"indexers of {facts.model_type!r} choose among all tokens, and this scheme evicts "
            "some. Use a scheme without eviction."
        )
    uses = {"tau": spec.tau, "evict": spec.evict, "background": spec.background}
    found = [name for name, value in uses.items() if value is not None]
    if facts.has_latents and found:
        raise ValueError(
            f"the cache of {facts.model_type!r} holds latents, which the model expands for an "
            f"attention that knows no {found}. Use another scheme, e.g. duotone.scheme('kivi', "
            "bits=2)."
        )


def _check_unequal(facts: ModelFacts, spec: CacheSpec) -> None:
    """Raise for schemes that take all layers alike, where these differ or read one another."""
    differs = len(set(facts.shapes)) > 1
    if differs and (spec.share is not None or spec.evict is not None):
        what = "evicts tokens" if spec.share is None else "shares codes between layers"
        raise ValueError(
            f"a scheme that {what} needs layers with K and V of one shape; those of "
            f"{facts.model_type!r} differ. Use another scheme, e.g. duotone.scheme('kivi', bits=2)."
        )
    if facts.readers and spec.evict is not None:
        raise ValueError(
            "a layer evicts tokens by its own scores, and other layers of "
            f"{facts.model_type!r} read its K and V. Use a scheme without eviction."
        )
