"""Bytes of one sequence in a cache, predicted from a model's facts and a spec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duotone.cache.eviction import fixed_weights, layer_counts
from duotone.hf.model.facts import ModelFacts
from duotone.quant import CacheSpec, KVSpec, tensor_bytes
from duotone.quant.accounting import token_bytes
from duotone.quant.small_floats import PARAM_TYPES


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one sequence.

    codes, params, dense: of packed layers. windows: of layers with a window that stay
    transformers' own. dense_tokens: of both kinds in 16 bit. states, pictures: of fixed size, in
    layers that stay transformers' own. None where the model's config does not say.
    """

    codes: int
    params: int
    dense: int
    windows: int
    dense_tokens: int
    states: int | None
    pictures: int | None

    @property
    def packed(self) -> int:
        """Bytes of packed layers."""
        return self.codes + self.params + self.dense

    @property
    def tokens(self) -> int:
        """Bytes that grow with tokens."""
        return self.packed + self.windows

    @property
    def fixed(self) -> int:
        """Bytes of states and pictures, as far as known."""
        return (self.states or 0) + (self.pictures or 0)

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        return self.tokens + self.fixed

    @property
    def dense_equivalent(self) -> int:
        """Bytes of all layers in 16 bit."""
        return self.dense_tokens + self.fixed


def cache_bytes(
    facts: ModelFacts,
    spec: CacheSpec,
    visual_tokens: int,
    text_tokens: int,
    new_tokens: int,
    images: int = 1,
) -> CacheBytes:
    """Predict the bytes of a sequence after its last generated token was fed back.

    visual_tokens, text_tokens: of the prompt. images: equal runs of its visual tokens, or pictures
    that layers attend to next to the tokens.
    """
    codes = params = dense = 0
    kept = _kept_prompt(facts, spec, visual_tokens, text_tokens)
    for layer, (visual, text) in enumerate(kept):
        dense_here, stream = _text_places(spec, visual, text, new_tokens)
        spans = _visual_spans(spec, visual, images) | {"text": [stream]}
        more = _layer_bytes(facts, spec, layer, spans)
        codes, params = codes + more[0], params + more[1]
        elements = dense_here * facts.shapes[layer].elements + _exact_values(
            facts, spec, layer, stream
        )
        dense += elements * facts.element_bytes
    tokens = visual_tokens + text_tokens + new_tokens
    in_window = tokens if facts.window is None else min(tokens, facts.window - 1)
    windows = sum(shape.elements for shape in facts.window_shapes)
    windows *= in_window * facts.element_bytes
    own = in_window if any(facts.sliding) else tokens
    own_bytes = own * facts.elements * facts.element_bytes + windows
    pictures = None if facts.picture_bytes is None else images * facts.picture_bytes
    return CacheBytes(codes, params, dense, windows, own_bytes, facts.state_bytes, pictures)


def _visual_spans(spec: CacheSpec, tokens: int, images: int) -> dict[str, list[int]]:
    """Tokens of each span that has ranges of its own; equal runs, the remainder on the first."""
    count = max(1, images) if spec.ranges == "run" else 1
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    if spec.background is None:
        return {"visual": sizes}
    front = [spec.foreground_of(size) for size in sizes]
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
                params += token_bytes(getattr(policy, which), size)
    if own.key_norm:
        params += shape.kv_heads * shape.head_dim * PARAM_TYPES[own.text.key.param_dtype].itemsize
    return codes, params


def _exact_values(facts: ModelFacts, spec: CacheSpec, layer: int, stream: int) -> int:
    """Numbers of V that one layer keeps in 16 bit for packed tokens of a stream."""
    text, shape = spec.at_layer(layer).text, facts.shapes[layer]
    lag = text.value.lag if isinstance(text, KVSpec) else 0
    return min(lag, stream) * shape.kv_heads * shape.head_dims[-1]


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
