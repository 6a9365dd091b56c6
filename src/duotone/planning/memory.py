"""Memory of a scheme on a model, and the number of sequences that fit, before anything runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from duotone.attention import Shape, resolve_layers
from duotone.attention.plan import alike
from duotone.cache.eviction import fixed_weights, layer_counts
from duotone.hf.model.extreme_keys import warn_of_extreme_keys
from duotone.hf.model.facts import ModelFacts, check_no_states, check_spec, model_facts
from duotone.planning.shapes import SHAPE_8B
from duotone.quant import CacheSpec, KVSpec, tensor_bytes
from duotone.quant.small_floats import PARAM_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """Cache bytes of one sequence at its full length, and sequences per budget.

    codes_bytes, params_bytes, dense_bytes: parts of bytes_per_sequence, as `MemoryReport` counts
    them (without its index and spare slots). Windows that stay transformers' own are the rest.
    max_batch, dense_max_batch: sequences whose caches fit `budget_bytes`, with this scheme and with
    16 bit; None without a budget.
    """

    visual_tokens: int
    text_tokens: int
    new_tokens: int
    codes_bytes: int
    params_bytes: int
    dense_bytes: int
    bytes_per_sequence: int
    dense_equivalent_bytes: int
    bits_per_element: float
    nominal_bits: float
    budget_bytes: int | None
    max_batch: int | None
    dense_max_batch: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return asdict(self)


def plan(
    model_or_config: PreTrainedModel | PreTrainedConfig | ModelFacts,
    spec: CacheSpec,
    *,
    visual_tokens: int = 0,
    text_tokens: int = 0,
    new_tokens: int = 0,
    images: int = 1,
    budget_bytes: int | None = None,
) -> Plan:
    """Predict the cache of one sequence.

    Which tokens an evicting scheme drops depends on scores. The plan takes equal shares of visual
    and text tokens and, where layers share their budget by sparsity, equal layers. The plan is
    exact for 16-bit tokens, whose number over all layers is fixed, and an estimate for codes.

    visual_tokens, text_tokens: of the prompt. new_tokens: generated and fed back. images: number of
    equal runs of visual tokens, which matters where a scheme has a range per run.
    budget_bytes: memory for caches alone, without weights.
    Errors: ValueError for negative counts, no tokens, more images than visual tokens, or an
    unsupported model.
    """
    counts = {"visual_tokens": visual_tokens, "text_tokens": text_tokens, "new_tokens": new_tokens}
    _check_counts({**counts, "images": images, "budget_bytes": budget_bytes or 0})
    known = isinstance(model_or_config, ModelFacts)
    facts = model_or_config if known else model_facts(model_or_config)
    check_no_states(facts, "a plan")
    check_spec(facts, spec)
    if hasattr(model_or_config, "get_decoder"):
        warn_of_extreme_keys(model_or_config, facts, spec)
    codes = params = dense = 0
    kept = _kept_prompt(facts, spec, visual_tokens, text_tokens)
    for layer, (visual, text) in enumerate(kept):
        dense_here, stream = _text_places(spec, visual, text, new_tokens)
        spans = _visual_spans(spec, visual, images) | {"text": [stream]}
        more = _layer_bytes(facts, spec, layer, spans)
        codes, params = codes + more[0], params + more[1]
        dense += dense_here * facts.shapes[layer].elements * facts.element_bytes
    token_bytes = facts.elements * facts.element_bytes
    tokens, packed = sum(counts.values()), codes + params + dense
    in_window = tokens if facts.window is None else min(tokens, facts.window - 1)
    windows = sum(shape.elements for shape in facts.window_shapes)
    windows *= in_window * facts.element_bytes
    total = packed + windows
    dense_total = (in_window if any(facts.sliding) else tokens) * token_bytes + windows
    return Plan(
        **counts,
        codes_bytes=codes,
        params_bytes=params,
        dense_bytes=dense,
        bytes_per_sequence=total,
        dense_equivalent_bytes=dense_total,
        bits_per_element=8 * packed / (tokens * facts.elements),
        nominal_bits=spec.nominal_bits(facts.layers),
        budget_bytes=budget_bytes,
        max_batch=None if budget_bytes is None else budget_bytes // total,
        dense_max_batch=None if budget_bytes is None else budget_bytes // dense_total,
    )


def attention_paths(
    facts: ModelFacts, spec: CacheSpec, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Implementation per kind of tokens, as plain data: a dictionary per group of layers.

    layers: their numbers. tokens: as `attention.plan` names them. runs: "cuda", "triton" or
    "reference". why: reason against the CUDA kernels, or None. device: None: an H200.
    """
    if why := facts.against_kernels:
        every, kinds = list(range(facts.layers)), ("visual", "text", "dense")
        return [{"layers": every, "tokens": x, "runs": "reference", "why": why} for x in kinds]
    dtype = {2: torch.bfloat16, 4: torch.float32}.get(facts.element_bytes, torch.float64)
    shapes = [Shape(each.head_dim, each.q_heads, each.kv_heads, dtype) for each in facts.shapes]
    return [
        {"layers": layers, "tokens": tokens, "runs": plan.readers[tokens].impl, "why": why}
        for layers, plan in alike(resolve_layers(spec, facts.sliding, shapes, device))
        for tokens, why in plan.reasons.items()
    ]


def true_bits(spec: CacheSpec, tokens: int = 8192, facts: ModelFacts = SHAPE_8B) -> float:
    """True bits per number over `tokens` that the spec quantizes, windows in 16 bit included.

    Visual tokens of one image where it has a policy for them, tokens of the stream otherwise.
    """
    kind = "text_tokens" if spec.visual == "text" else "visual_tokens"
    return plan(facts, spec, **{kind: tokens}).bits_per_element


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0; got {value!r}.")
    if not counts["visual_tokens"] + counts["text_tokens"] + counts["new_tokens"]:
        raise ValueError("a plan needs tokens; got 0 visual, 0 text and 0 new ones.")
    if counts["visual_tokens"] and counts["images"] < 1:
        raise ValueError("visual tokens come in at least one image; got images=0.")
    if counts["images"] > max(1, counts["visual_tokens"]):
        raise ValueError(
            "an image has at least one visual token; got "
            f"{counts['images']} images of {counts['visual_tokens']} visual tokens. Give the "
            "visual tokens of all images of a sequence together, or fewer images."
        )


def _visual_spans(spec: CacheSpec, tokens: int, images: int) -> dict[str, list[int]]:
    """Tokens of each span that has ranges of its own; equal runs, the remainder on the first."""
    count = images if spec.ranges == "run" else 1
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    if spec.background is None:
        return {"visual": sizes}
    front = [math.ceil(spec.foreground * size) for size in sizes]
    return {"visual": front, "background": [n - f for n, f in zip(sizes, front, strict=True)]}


def _kept_prompt(
    facts: ModelFacts, spec: CacheSpec, visual_tokens: int, text_tokens: int
) -> list[tuple[int, int]]:
    """(visual, text) tokens of the prompt that stay in each layer."""
    prompt = visual_tokens + text_tokens
    if spec.evict is None or prompt < 2:
        return [(visual_tokens, text_tokens)] * facts.layers
    weights = fixed_weights(spec.evict, facts.layers)
    weights = torch.ones(facts.layers, 1) if weights is None else weights
    may_go = visual_tokens if spec.evict.which == "visual" else prompt
    counts = layer_counts(spec.evict, weights, torch.tensor([may_go]))[:, 0].tolist()
    if spec.evict.which == "visual":
        return [(count, text_tokens) for count in counts]
    visual = [round(count * visual_tokens / prompt) for count in counts]
    return [(v, count - v) for v, count in zip(visual, counts, strict=True)]


def _layer_bytes(
    facts: ModelFacts, spec: CacheSpec, layer: int, spans: dict[str, list[int]]
) -> tuple[int, int]:
    """(codes, params) of one layer; codes that another layer keeps count in that layer."""
    own, shape, codes, params = spec.at_layer(layer), facts.shapes[layer], 0, 0
    for name, sizes in spans.items():
        policy = getattr(own, name)
        kinds = ("key", "value") if isinstance(policy, KVSpec) else ()
        for which, head_dim in zip(kinds, shape.head_dims, strict=False):
            stores = spec.source(which, layer, facts.layers) == layer
            for size in sizes:
                parts = tensor_bytes(getattr(policy, which), size, head_dim)
                codes += shape.kv_heads * parts[0] * stores
                params += shape.kv_heads * parts[1]
    if own.key_norm:
        params += shape.kv_heads * shape.head_dim * PARAM_TYPES[own.text.key.param_dtype].itemsize
    return codes, params


def _text_places(
    spec: CacheSpec, visual_tokens: int, text_tokens: int, new_tokens: int
) -> tuple[int, int]:
    """(dense tokens, stream tokens) after the last generated token was fed back."""
    dense = visual_tokens if spec.visual == "dense" else 0
    stream = text_tokens + new_tokens + (visual_tokens if spec.visual == "text" else 0)
    if not isinstance(spec.text, KVSpec):
        return dense + stream, 0
    # A token enters the window after the flush of its own step.
    settled = stream - (1 if new_tokens else 0) - spec.sink - spec.recent
    group = spec.flush_tokens
    packed = max(0, settled) // group * group
    return dense + stream - packed, packed
