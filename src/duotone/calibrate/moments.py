"""Moments of K, V and queries for bases, summed while the model reads and answers.

Sums only: memory does not grow with the samples. This file watches a model; other files use the
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from duotone.hf.model.attentions import attentions, is_readable
from duotone.hf.model.facts import ModelFacts
from duotone.hf.recording import recording
from duotone.inference.batch import end_token_ids, generate, make_cache, prepare
from duotone.tune.batches import facts_of as facts_of_encoded

from .answers import without_tokens
from .gates import Gates, Outputs
from .places import Places, places_of
from .streams import Stream, hearing

TINY = 1e-30  # least square of a stream
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
Heads = Float[Tensor, "batch heads tokens head_dim"]
Sums = Float[Tensor, "kv_heads head_dim head_dim"]
Gram = Float[Tensor, "q_heads head_dim head_dim"]


@dataclass(frozen=True)
class CalibrationBatch:
    """Encoded prompts, and how many tokens their answers may have.

    tensors: as the model's processor makes them, left-padded; or inputs_embeds [B, tokens, hidden]
    and attention_mask, with visual_mask [B, tokens], True at visual tokens, if there are any.
    never: tokens that answers do not have; with some, answers have no end.
    """

    tensors: dict[str, Tensor]
    answer_tokens: int
    never: tuple[int, ...] = ()


def facts_of(model: Any, batches: Sequence[CalibrationBatch]) -> ModelFacts:
    """Facts of a model that reads these batches, which may say by a mask what is visual."""
    return facts_of_encoded(model, [batch.tensors for batch in batches])


@dataclass
class LayerMoments:
    """Sums over tokens x of one layer, per kv head, in float64.

    key, value: of (x - mean)(x - mean)^T about the mean of the token's own span. query: of q q^T,
    also over the q heads of the kv head. output: sum over these of W_h^T W_h, where W_h are the
    columns of W_o for one q head. Where a gate g stands before W_o, the mean of g g^T is a factor.
    gates: of g g^T over `gated` tokens, per q head. sm_scale: factor of the scores q . k. spans:
    number of them.
    amplified: of log(1 + |m|^2 / |x|^2) over `heard` tokens, with x the residual stream after
    attention and m what the layer adds to it.
    """

    key: Sums
    value: Sums
    query: Sums
    output: Sums
    sm_scale: float
    groups: int
    tokens: int = 0
    spans: int = 0
    queries: int = 0
    gates: Gram | None = None
    gated: int = 0
    amplified: float = 0.0
    heard: int = 0

    def to(self, device: torch.device) -> None:
        """Move the sums to a device."""
        for name in ("key", "value", "query", "output"):
            setattr(self, name, getattr(self, name).to(device))

    def covariance(self, which: str) -> Sums:
        """Covariance of "key" or "value" about the spans' means."""
        return getattr(self, which) / max(self.tokens, 1)

    @property
    def scores(self) -> Sums:
        """Mean over queries of sm_scale^2 q q^T, summed over q heads: the metric of K's errors."""
        return self.query * self.sm_scale**2 / max(self.queries, 1)

    @property
    def weight(self) -> float:
        """Factor of errors at the layer's attention: a = 1 + |m|^2 / |x|^2, a geometric mean.

        The MLP sees an error dx of its stream x through a norm, as a turn by |dx| / |x|. Its output
        m moves by about as much of itself, so |dy|^2 = a |dx|^2 at the layer's output. The mean is
        geometric because an MLP makes streams of a few tokens hundreds of times larger. Layers that
        are not heard have 1.
        """
        return math.exp(self.amplified / max(self.heard, 1))


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


def output_metric(module: nn.Module, facts: ModelFacts, gates: Gram | None = None) -> Sums:
    """Sum over the q heads of every kv head of W_h^T W_h. Errors: as of `output_weight`.

    gates: factors of these, the means of g g^T; None: ones.
    """
    by_head = output_weight(module, facts).double()
    by_head = by_head.unflatten(-1, (facts.shape.kv_heads, -1, facts.shape.head_dim))
    if gates is None:
        return torch.einsum("xkgd,xkge->kde", by_head, by_head)
    gates = gates.unflatten(0, by_head.shape[1:3])
    return (torch.einsum("xkgd,xkge->kgde", by_head, by_head) * gates).sum(1)


def output_projection(module: nn.Module) -> nn.Module | None:
    """The output projection of an attention, by its name."""
    found = (getattr(module, name, None) for name in OUTPUT_PROJECTIONS)
    return next((x for x in found if getattr(x, "weight", None) is not None), None)


def output_weight(module: nn.Module, facts: ModelFacts) -> Float[Tensor, "hidden columns"]:
    """Weight of an attention's output projection. Errors: ValueError without one to be read."""
    weight = getattr(output_projection(module), "weight", None)
    columns = facts.shape.q_heads * facts.shape.head_dim
    shown = "none" if weight is None else f"{tuple(weight.shape)} of {weight.dtype}"
    if not is_readable(weight) or weight.shape[-1] != columns:
        raise ValueError(
            f"attention must have an output projection {OUTPUT_PROJECTIONS} with a weight of "
            f"{columns} columns that can be read; {type(module).__name__} of "
            f"{facts.model_type!r} has {shown}. "
            "Calibrate the model before its weights are quantized"
        )
    return weight


def softmax_scale(facts: ModelFacts, scaling: float | None) -> float:
    """Factor of a layer's scores, by the argument that attention received."""
    return facts.shape.head_dim**-0.5 if scaling is None else float(scaling)


@dataclass
class Recorder:
    """Sums the moments of one batch after the other while attention passes through it.

    A batch is read and then answered token by token. alive: [B] True where the answer goes on;
    other sequences only feed padding to the model. read: layers that have seen the prompt.
    """

    facts: ModelFacts
    places: Places | None = None
    alive: Tensor | None = None
    read: set[int] = field(default_factory=set)
    layers: dict[int, LayerMoments] = field(default_factory=dict)
    latest: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, places: Places) -> None:
        """Prepare for a new batch's prompt, the next call of every layer."""
        self.places, self.read = places, set()
        # A sequence with no counted tokens of K and V has no counted queries.
        self.alive = (places.spans >= 0).any(1)

    def counted(self, layer: int, query: Heads) -> Bool[Tensor, "batch tokens"]:
        """Mask of the tokens whose queries count in this call: the prompt's, then each step's."""
        if layer in self.read:
            return self.alive[:, None].expand(-1, query.shape[2]).to(query.device)
        self.read.add(layer)
        return self.places.queries.to(query.device)

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """Add a prompt's K, V and queries, or the query of an answer's token."""
        if module.layer_idx not in self.facts.packed:
            return
        index = module.layer_idx
        layer = self.layers.get(index) or self._new_layer(module, query, scaling)
        if index not in self.read:
            layer.to(query.device)
            self._add_prompt(layer, key, value)
        where = self.counted(index, query)
        layer.query += query_sums(query, where, self.facts.shape.kv_heads)
        layer.queries += int(where.sum())
        self.latest[index] = where

    def hear(self, index: int, stream: Stream, output: Stream) -> None:
        """Add what a layer makes of the stream after its attention, at the tokens that count."""
        where = self.latest[index].to(stream.device)
        if index not in self.layers or stream.shape[:2] != where.shape:
            return
        x, y = stream[where].double(), output.to(stream.device)[where].double()
        ratios = (y - x).square().sum(-1) / x.square().sum(-1).clamp_min(TINY)
        self.layers[index].amplified += float(ratios.log1p().sum())
        self.layers[index].heard += len(ratios)

    def gate(self, index: int, gates: Outputs) -> None:
        """Add the gates of attention's outputs, at the tokens that count."""
        if index in self.layers:
            rows = gates[self.latest[index].to(gates.device)].double()
            layer = self.layers[index]
            sums = torch.einsum("nhd,nhe->hde", rows, rows)
            layer.gates = sums if layer.gates is None else layer.gates.to(sums.device) + sums
            layer.gated += len(rows)

    def _add_prompt(self, layer: LayerMoments, key: Heads, value: Heads) -> None:
        spans = self.places.spans.to(key.device)
        layer.key += centred_sums(key, spans)
        layer.value += centred_sums(value, spans)
        layer.tokens += int((spans >= 0).sum())
        layer.spans += len(spans[spans >= 0].unique())

    def _new_layer(self, module: nn.Module, query: Heads, scaling: float | None) -> LayerMoments:
        facts, heads = self.facts, self.facts.shape
        shape = (heads.kv_heads, heads.head_dim, heads.head_dim)
        zeros = [torch.zeros(shape, dtype=torch.float64, device=query.device) for _ in range(3)]
        output, groups = output_metric(module, facts), heads.q_heads // heads.kv_heads
        made = LayerMoments(*zeros, output, softmax_scale(facts, scaling), groups)
        self.layers[module.layer_idx] = made
        return made


@dataclass(frozen=True)
class _StillAnswering:
    """A stopping criterion that stops nothing: it passes the ended answers to the recorder."""

    recorder: Recorder
    ends: Tensor

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Bool[Tensor, " batch"]:
        self.recorder.alive &= ~torch.isin(input_ids[:, -1], self.ends)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def _answer(model: Any, given: CalibrationBatch, recorder: Recorder, group: int | None) -> None:
    """Answer a batch greedily in 16 bit; `recorder` receives every layer's calls."""
    batch = prepare(model, given.tensors)
    recorder.begin(places_of(batch, group))
    cache = make_cache(model, None, batch)
    packed, gates = recorder.facts.packed, Gates(recorder.gate)
    projections = {m.layer_idx: output_projection(m) for m in attentions(model, recorder.facts)}
    with (
        without_tokens(model, given.never),
        recording(model, recorder.record, gates.attended),
        gates.watching({number: x for number, x in projections.items() if x is not None}),
        hearing(model, packed, recorder.hear),
    ):
        ends = torch.tensor(sorted(end_token_ids(model)), device=model.device)
        stopping = [_StillAnswering(recorder, ends)]
        generate(model, batch, cache, given.answer_tokens, stopping=stopping)


def gather_moments(
    model: Any,
    batches: Sequence[CalibrationBatch],
    group: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[LayerMoments]:
    """Moments of all layers over batches, each answered greedily through the 16-bit cache.

    group: tokens per span of the stream of text; None: spans are runs of visual tokens. progress:
    called with the batches done.
    """
    recorder = Recorder(facts_of(model, batches))
    for number, given in enumerate(batches, start=1):
        _answer(model, given, recorder, group)
        if progress:
            progress(number)
    _count_gates(model, recorder)
    for layer in recorder.layers.values():
        layer.to(torch.device("cpu"))
    return [recorder.layers[index] for index in sorted(recorder.layers)]


@torch.inference_mode()
def _count_gates(model: Any, recorder: Recorder) -> None:
    """Give layers with gates the metric of these."""
    for attention in attentions(model, recorder.facts):
        layer = recorder.layers.get(attention.layer_idx)
        if layer is not None and layer.gated:
            layer.output = output_metric(attention, recorder.facts, layer.gates / layer.gated)
            layer.gates = layer.gates.cpu()
