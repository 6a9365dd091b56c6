"""What a decoder takes in memory and in time: the largest batch in a budget, the time of a step.

A step reads all weights once and every sequence's cache once, and multiplies. On a machine that
copies `c` bytes and multiplies `f` numbers per second it takes no less than

    max(weights / c, operations / f) + caches / c

The first term is what batches grow into: beyond some 200 sequences an H200 multiplies longer than
it reads weights, and a smaller cache then buys less than its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from duotone.cache.places import flush_count
from duotone.hf.facts import ModelFacts, check_spec
from duotone.planning import plan
from duotone.quant import CacheSpec, KVSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Tokens of a prompt that an MLP takes at a time: bounds what a prefill holds beside the caches.
PREFILL_TOKENS = 2048
# What the allocator rounds up, the workspaces of matrix products, and what graphs keep.
WORKSPACE_BYTES = 300 << 20


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a language model's decoder with gated MLPs."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    element_bytes: int = 2

    @classmethod
    def of(cls, config: PreTrainedConfig) -> DecoderShape:
        """From a model's config. Errors: ValueError where it lacks a size."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        sizes = {"hidden": "hidden_size", "mlp": "intermediate_size", "vocab": "vocab_size"}
        found = {name: getattr(text, field, None) for name, field in sizes.items()}
        missing = [sizes[name] for name, value in found.items() if not isinstance(value, int)]
        if missing:
            raise ValueError(
                f"step times need a decoder with one MLP size; {config.model_type!r} has no "
                f"{missing}. Plan the memory alone with duotone.plan."
            )
        return cls(
            name=config.model_type,
            layers=text.num_hidden_layers,
            q_heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            **found,
        )

    @property
    def facts(self) -> ModelFacts:
        """The shape of its cache."""
        return ModelFacts(
            model_type=self.name,
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
            sliding=(False,) * self.layers,
            visual_token_ids=(0,),
        )

    @property
    def read_weights(self) -> int:
        """Numbers of all matrices that a step multiplies with."""
        heads = (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.mlp) + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embedding included."""
        return (self.read_weights + self.hidden * self.vocab) * self.element_bytes


# Language models of the papers' tables (InternVL2.5, arXiv 2412.05271).
SHAPES = {
    shape.name: shape
    for shape in (
        DecoderShape("internvl2.5-8b", 32, 4096, 32, 8, 128, 14336, 92553),
        DecoderShape("internvl2.5-26b", 48, 6144, 48, 8, 128, 16384, 92553),
    )
}


@dataclass(frozen=True)
class Load:
    """Tokens of every sequence: visual and text ones of the prompt, generated ones."""

    visual: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.visual + self.prompt + self.new


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, and what a step costs beside them.

    copy_bytes_per_s, operations_per_s: measured by a large copy and a large matrix product.
    product_share: of the latter, what products with a batch's few rows reach.
    layer_s: time per layer that neither bytes nor operations explain (small kernels, tails).
    dense_layer_s, segment_s: the same of attention to a 16-bit cache, and to each segment of a
    packed one.
    *_share: of the copy bandwidth, what attention reaches: dense, on a 16-bit cache alone; segment,
    on 16-bit tokens beside packed ones; span, on packed spans; stream, on packed groups.
    shared_share: of packed groups whose codes layers share, which come in pieces.
    wide_share: what is left of span and segment where kv heads have more than four q heads.

    Fitted to the 77 measurements in results/throughput, of one H200, all of which they meet within
    6 %.
    """

    copy_bytes_per_s: float = 4.25e12
    operations_per_s: float = 800e12
    product_share: float = 0.74
    layer_s: float = 26e-6
    dense_layer_s: float = 17e-6
    segment_s: float = 12.5e-6
    dense_share: float = 0.96
    segment_share: float = 1.0
    span_share: float = 0.9
    stream_share: float = 0.78
    shared_share: float = 0.46
    wide_share: float = 0.7


@dataclass(frozen=True)
class Prediction:
    """Largest batch in a budget and time of a step in the middle of the generated tokens.

    roofline_s: no machine of these rates is faster. bytes_per_sequence: with spare slots, as the
    buffers are allocated. activation_bytes: beside the caches.
    """

    max_batch: int
    step_s: float
    roofline_s: float
    bytes_per_sequence: int
    activation_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return asdict(self)


def predict(
    shape: DecoderShape,
    spec: CacheSpec | None,
    load: Load,
    budget_bytes: int,
    machine: Machine | None = None,
    batch: int | None = None,
) -> Prediction:
    """Predict one row of the throughput table.

    spec: None for a 16-bit cache. budget_bytes: for caches and activations, without weights.
    batch: predict the time of this one; by default the largest. Nothing fits: max_batch 0.
    """
    machine = machine or Machine()
    per_sequence = allocated_bytes(shape, spec, load)
    most = budget_bytes // per_sequence
    while most and most * per_sequence + activation_bytes(shape, spec, load, most) > budget_bytes:
        most -= 1
    at = most if batch is None else batch
    return Prediction(
        max_batch=most,
        step_s=step_seconds(shape, spec, load, at, machine),
        roofline_s=roofline_seconds(shape, spec, load, at, machine),
        bytes_per_sequence=per_sequence,
        activation_bytes=activation_bytes(shape, spec, load, at),
    )


def predict_again(result: Mapping[str, Any]) -> Prediction:
    """Today's prediction for a result file of `duotone bench throughput`, at its batch.

    max_batch is the predicted one. The machine's rates are the file's; what kernels reach of them
    is what `Machine` says now.
    """
    at, measured = result["configuration"], result["machine"]
    rates = {name: measured[name] for name in ("copy_bytes_per_s", "operations_per_s")}
    return predict(
        DecoderShape(**result["model"]),
        None if result["spec"] is None else CacheSpec.from_dict(result["spec"]),
        Load(at["visual"], at["prompt"], at["new"]),
        at["budget_bytes"],
        Machine(**rates),
        batch=result["batch"],
    )


def allocated_bytes(shape: DecoderShape, spec: CacheSpec | None, load: Load) -> int:
    """Bytes of one sequence in fixed buffers (`cache.static`): windows are as wide as they get."""
    token_bytes = _token_bytes(shape)
    if spec is None:
        return load.tokens * token_bytes
    check_spec(shape.facts, spec)
    counted = {"visual_tokens": load.visual, "text_tokens": load.prompt}
    if not isinstance(spec.text, KVSpec):
        return plan(shape.facts, spec, **counted, new_tokens=load.new).bytes_per_sequence
    group = spec.flush_tokens
    stream = load.prompt + (load.visual if spec.visual == "text" else 0)
    window = spec.sink + spec.recent
    before = max(0, stream - window) // group * group
    leaves = flush_count(stream - before - spec.sink, load.new, spec.recent, group)
    slots = min(stream - before + load.new, window + group)
    # As many tokens as leave the window exactly, so that all parts of the stream are counted.
    full = replace(load, new=before + leaves * group + window - stream)
    exact = plan(shape.facts, spec, **counted, new_tokens=max(0, full.new) + bool(full.new > 0))
    kept = exact.codes_bytes + exact.params_bytes
    dense = load.visual if spec.visual == "dense" else 0
    return kept + (slots + dense) * token_bytes


def activation_bytes(shape: DecoderShape, spec: CacheSpec | None, load: Load, batch: int) -> int:
    """The larger of what one sequence's prefill and a decode step of the batch hold at once."""
    tokens, one = load.visual + load.prompt, shape.element_bytes
    heads = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    states = tokens * (3 * shape.hidden + 3 * heads) * one
    prefill = states + min(tokens, PREFILL_TOKENS) * 4 * shape.mlp * one
    step = batch * one * (2 * shape.vocab + 4 * shape.hidden + 2 * heads + 4 * shape.mlp)
    # Partial outputs of attention, in float32.
    step += batch * shape.q_heads * (shape.head_dim + 2) * 4 * 4
    if spec is not None and isinstance(spec.text, KVSpec):
        # One layer's group of every sequence leaves the window: ten copies in float32 without a
        # kernel that packs.
        step += batch * spec.flush_tokens * shape.kv_heads * shape.head_dim * 4 * 10
    return max(prefill, step) + WORKSPACE_BYTES


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one sequence that a step reads: packed spans, packed stream, 16-bit tokens."""

    span: int
    stream: int
    dense: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.span + self.stream + self.dense


def read_bytes(shape: DecoderShape, spec: CacheSpec | None, load: Load) -> StepBytes:
    """What a step reads, `load.new` tokens in."""
    if spec is None:
        return StepBytes(0, 0, load.tokens * _token_bytes(shape))
    everything = plan(
        shape.facts,
        spec,
        visual_tokens=load.visual,
        text_tokens=load.prompt,
        new_tokens=load.new,
    )
    packed, span = everything.codes_bytes + everything.params_bytes, 0
    if isinstance(spec.visual, KVSpec) and load.visual:
        alone = plan(shape.facts, spec, visual_tokens=load.visual)
        span = alone.codes_bytes + alone.params_bytes
    return StepBytes(span, packed - span, everything.dense_bytes)


def roofline_seconds(
    shape: DecoderShape, spec: CacheSpec | None, load: Load, batch: int, machine: Machine
) -> float:
    """The formula of this file, in the middle of the generated tokens."""
    cache = batch * read_bytes(shape, spec, replace(load, new=load.new // 2)).total
    return _product_seconds(shape, batch, machine) + cache / machine.copy_bytes_per_s


def step_seconds(
    shape: DecoderShape, spec: CacheSpec | None, load: Load, batch: int, machine: Machine
) -> float:
    """The same with what kernels reach and what a layer costs beside."""
    read = read_bytes(shape, spec, replace(load, new=load.new // 2))
    if spec is None:
        copied, beside_s = read.dense / machine.dense_share, machine.dense_layer_s
    else:
        wide = machine.wide_share if shape.q_heads > 4 * shape.kv_heads else 1.0
        stream_share = machine.stream_share if spec.share is None else machine.shared_share
        copied = read.span / (machine.span_share * wide) + read.stream / stream_share
        copied += read.dense / (machine.segment_share * wide)
        beside_s = machine.segment_s * sum(n > 0 for n in (read.span, read.stream, read.dense))
    attention = batch * copied / machine.copy_bytes_per_s
    products = _product_limits(shape, batch, machine, machine.product_share)
    # Near the batch at which both limits are equal, neither is met.
    both = sum(seconds**3 for seconds in products) ** (1 / 3)
    return both + attention + shape.layers * (machine.layer_s + beside_s)


def _product_seconds(shape: DecoderShape, batch: int, machine: Machine) -> float:
    return max(_product_limits(shape, batch, machine))


def _product_limits(
    shape: DecoderShape, batch: int, machine: Machine, share: float = 1.0
) -> tuple[float, float]:
    """Seconds of reading all weights, and of multiplying with them at a share of the rate."""
    read = shape.read_weights * shape.element_bytes / machine.copy_bytes_per_s
    return read, 2 * shape.read_weights * batch / (share * machine.operations_per_s)


def _token_bytes(shape: DecoderShape) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.element_bytes
