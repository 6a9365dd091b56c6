"""What bases are made of: moments of K, V and queries, summed while the model reads and answers.

Sums only: memory does not grow with the samples. Knows how a model is watched, not what is done
with the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from duotone.hf.attachment import set_text_implementation, text_implementation
from duotone.hf.facts import ModelFacts, model_facts
from duotone.inference import Batch, end_token_ids, generate, make_cache, prepare

NAME = "duotone-calibrate"
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
Heads = Float[Tensor, "batch heads tokens head_dim"]
Sums = Float[Tensor, "kv_heads head_dim head_dim"]


@dataclass(frozen=True)
class CalibrationBatch:
    """Encoded prompts, and how many tokens their answers may have."""

    tensors: dict[str, Tensor]
    answer_tokens: int


@dataclass
class LayerMoments:
    """Sums over tokens x of one layer, per kv head, in float64.

    key, value: of (x - mean)(x - mean)^T about the mean of the token's own span. query: of q q^T,
    also over the q heads of the kv head. output: sum over these of W_h^T W_h, where W_h are the
    columns of W_o for one q head. sm_scale: what scores q . k are multiplied by.
    """

    key: Sums
    value: Sums
    query: Sums
    output: Sums
    sm_scale: float
    groups: int
    tokens: int = 0
    queries: int = 0

    def to(self, device: torch.device) -> None:
        """Move the sums, where they are not there yet."""
        for name in ("key", "value", "query", "output"):
            setattr(self, name, getattr(self, name).to(device))

    def covariance(self, which: str) -> Sums:
        """Of "key" or "value", about the spans' means."""
        return getattr(self, which) / max(self.tokens, 1)

    @property
    def scores(self) -> Sums:
        """Mean over queries of sm_scale^2 q q^T, summed over q heads: what errors of K do to s."""
        return self.query * self.sm_scale**2 / max(self.queries, 1)


@dataclass(frozen=True)
class Places:
    """Which tokens of a batch count.

    spans: [B, T] number of the span a token of K and V belongs to, -1: none. queries: [B, T].
    """

    spans: Int[Tensor, "batch tokens"]
    queries: Bool[Tensor, "batch tokens"]


def visual_places(visual_mask: Bool[Tensor, "batch tokens"], real: Tensor) -> Places:
    """Every run of visual tokens is a span; queries are of what stands behind the last one.

    A sequence without visual tokens gives nothing.
    """
    visual = visual_mask & real.bool()
    before = torch.nn.functional.pad(visual, (1, 0))[:, :-1]
    starts = (visual & ~before).flatten().cumsum(0).view_as(visual)
    later = visual.int().cumsum(1) == visual.sum(1, keepdim=True)
    behind = real.bool() & later & ~visual & visual.any(1, keepdim=True)
    return Places(torch.where(visual, starts - 1, -1), behind)


def text_places(real: Tensor, group: int) -> Places:
    """All real tokens; every `group` of a sequence's are a span, as in a stream of such groups."""
    real = real.bool()
    number = (real.cumsum(1) - 1).clamp(min=0) // group
    spans = number + torch.arange(len(real), device=real.device)[:, None] * (real.shape[1] + 1)
    return Places(torch.where(real, spans, -1), real)


def centred_sums(x: Heads, spans: Int[Tensor, "batch tokens"]) -> Sums:
    """Sum over tokens of (x - mean)(x - mean)^T per head, the mean that of the token's span."""
    _, number = spans[spans >= 0].unique(return_inverse=True)
    rows = x.transpose(1, 2)[spans >= 0].double()
    totals = rows.new_zeros(int(number.max()) + 1 if len(number) else 0, *rows.shape[1:])
    totals.index_add_(0, number, rows)
    rows = rows - (totals / number.bincount()[:, None, None])[number]
    return torch.einsum("nhd,nhe->hde", rows, rows)


def query_sums(query: Heads, where: Bool[Tensor, "batch tokens"], kv_heads: int) -> Sums:
    """Sum of q q^T over tokens and over the q heads of every kv head."""
    rows = query.transpose(1, 2)[where].double().unflatten(1, (kv_heads, -1))
    return torch.einsum("nkgd,nkge->kde", rows, rows)


def output_metric(module: nn.Module, facts: ModelFacts) -> Sums:
    """Sum over the q heads of every kv head of W_h^T W_h. Errors: ValueError without such a W_o."""
    found = (getattr(module, name, None) for name in OUTPUT_PROJECTIONS)
    weight = next((m.weight for m in found if getattr(m, "weight", None) is not None), None)
    columns = facts.q_heads * facts.head_dim
    if weight is None or weight.shape[-1] != columns or not weight.is_floating_point():
        raise ValueError(
            f"attention must have an output projection {OUTPUT_PROJECTIONS} with a weight of "
            f"{columns} columns that can be read; {type(module).__name__} of "
            f"{facts.model_type!r} has {'none' if weight is None else tuple(weight.shape)}. "
            "Calibrate the model before its weights are quantized"
        )
    by_head = weight.double().unflatten(-1, (facts.kv_heads, -1, facts.head_dim))
    return torch.einsum("xkgd,xkge->kde", by_head, by_head)


@dataclass
class Recorder:
    """Sums the moments of one batch after the other while attention passes through it.

    alive: [B] whose answer goes on; the rest only feed padding to the model.
    """

    facts: ModelFacts
    layers: dict[int, LayerMoments] = field(default_factory=dict)
    places: Places | None = None
    alive: Tensor | None = None
    read: set[int] = field(default_factory=set)

    def begin(self, places: Places) -> None:
        """The next call of every layer is of a new batch's prompt."""
        self.places, self.read = places, set()
        # A sequence without tokens of K and V that count has no queries that count either.
        self.alive = (places.spans >= 0).any(1)

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """Of a prompt K, V and queries; of an answer's token the query."""
        index = module.layer_idx
        layer = self.layers.get(index) or self._new_layer(module, query, scaling)
        if index not in self.read:
            self.read.add(index)
            layer.to(query.device)
            self._add_prompt(layer, key, value)
            where = self.places.queries
        else:
            where = self.alive[:, None].expand(-1, query.shape[2])
        where = where.to(query.device)
        layer.query += query_sums(query, where, self.facts.kv_heads)
        layer.queries += int(where.sum())

    def _add_prompt(self, layer: LayerMoments, key: Heads, value: Heads) -> None:
        spans = self.places.spans.to(key.device)
        layer.key += centred_sums(key, spans)
        layer.value += centred_sums(value, spans)
        layer.tokens += int((spans >= 0).sum())

    def _new_layer(self, module: nn.Module, query: Heads, scaling: float | None) -> LayerMoments:
        facts = self.facts
        shape = (facts.kv_heads, facts.head_dim, facts.head_dim)
        zeros = [torch.zeros(shape, dtype=torch.float64, device=query.device) for _ in range(3)]
        sm_scale = facts.head_dim**-0.5 if scaling is None else float(scaling)
        output, groups = output_metric(module, facts), facts.q_heads // facts.kv_heads
        made = LayerMoments(*zeros, output, sm_scale, groups)
        self.layers[module.layer_idx] = made
        return made


class Listener(Protocol):
    """What sees the queries, K and V of every layer as attention does."""

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """One layer of one step."""
        ...


@contextmanager
def recording(model: Any, recorder: Listener) -> Iterator[None]:
    """The language model's attention passes through `recorder`, and on to what it was before.

    Vision towers keep their own attention and are not seen. Undone at the end, come what may.
    """
    before = text_implementation(model)

    def attention(module, query, key, value, attention_mask, *args, scaling=None, **kwargs):
        recorder.record(module, query, key, value, scaling)
        run = _original(module, before)
        return run(module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    try:
        set_text_implementation(model, NAME)
        yield
    finally:
        set_text_implementation(model, before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME)


def _original(module: nn.Module, name: str) -> Callable[..., Any]:
    """The implementation of that name; "eager" is a function of the model's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


@dataclass(frozen=True)
class _StillAnswering:
    """A stopping criterion that stops nothing: it tells the recorder whose answer has ended."""

    recorder: Recorder
    ends: Tensor

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Bool[Tensor, " batch"]:
        self.recorder.alive &= ~torch.isin(input_ids[:, -1], self.ends)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def places_of(batch: Batch, facts: ModelFacts, group: int) -> Places:
    """Visual spans of a multimodal model's prompts; groups of all tokens of a text model's."""
    if facts.is_multimodal:
        return visual_places(batch.visual_mask, batch.attention_mask)
    return text_places(batch.attention_mask, group)


@torch.inference_mode()
def gather_moments(
    model: Any,
    batches: Iterable[CalibrationBatch],
    group: int = 128,
    progress: Callable[[int], None] | None = None,
    layers: dict[int, LayerMoments] | None = None,
    done: int = 0,
) -> list[LayerMoments]:
    """Moments of all layers over batches, each answered greedily through the 16-bit cache.

    group: tokens per span of a text model. progress: called with the batches done. layers: what the
    first `done` batches gave; the others are added to it.
    """
    recorder = Recorder(model_facts(model), {} if layers is None else layers)
    ends = torch.tensor(sorted(end_token_ids(model)), device=model.device)
    stopping = [_StillAnswering(recorder, ends)]
    with recording(model, recorder):
        for number, given in enumerate(islice(batches, done, None), start=done + 1):
            batch = prepare(model, given.tensors)
            recorder.begin(places_of(batch, recorder.facts, group))
            cache = make_cache(model, None, batch)
            generate(model, batch, cache, given.answer_tokens, stopping=stopping)
            if progress:
                progress(number)
    for layer in recorder.layers.values():
        layer.to(torch.device("cpu"))
    return [recorder.layers[index] for index in sorted(recorder.layers)]
