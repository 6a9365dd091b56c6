"""Memory and time of a decoder: the largest batch in a budget, the time of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from duotone.cache.places import flush_count
from duotone.hf.facts import check_spec
from duotone.planning.memory import plan
from duotone.planning.shapes import DecoderShape, Load
from duotone.planning.step_time import Machine, StepBytes, roofline_seconds, step_seconds
from duotone.quant import CacheSpec, KVSpec

# Tokens of a prompt that an MLP takes at a time: bounds what a prefill holds beside the caches.
PREFILL_TOKENS = 2048
# What the allocator rounds up, the workspaces of matrix products, and what graphs keep.
WORKSPACE_BYTES = 150 << 20
# What a stream's buffers and flushes take beside, in groups of one layer in float32: fitted, as the
# line above, to the largest batches that ran (results/throughput, all within 5 %).
FLUSH_COPIES = 28
# Of `Machine`, what `duotone bench throughput` measures itself.
MEASURED_RATES = ("copy_bytes_per_s", "operations_per_s")


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
    weights: str = "bf16",
) -> Prediction:
    """Predict one row of the throughput table.

    spec: None for a 16-bit cache. budget_bytes: for caches and activations, without weights.
    batch: predict the time of this one; by default the largest. Nothing fits: max_batch 0.
    weights: of the model: bf16, w8a8 or w4a8.
    """
    machine = machine or Machine()
    per_sequence = allocated_bytes(shape, spec, load)
    most = budget_bytes // per_sequence
    while most and most * per_sequence + activation_bytes(shape, spec, load, most) > budget_bytes:
        most -= 1
    at = most if batch is None else batch
    read = read_bytes(shape, spec, replace(load, new=load.new // 2))
    return Prediction(
        max_batch=most,
        step_s=step_seconds(shape, spec, read, at, machine, weights),
        roofline_s=roofline_seconds(shape, read, at, machine, weights),
        bytes_per_sequence=per_sequence,
        activation_bytes=activation_bytes(shape, spec, load, at),
    )


def predict_again(result: Mapping[str, Any]) -> Prediction:
    """Prediction of today's model for a result file of `duotone bench throughput`, at its batch.

    max_batch is the predicted one. The machine's rates are the file's; what kernels reach of them
    is what `Machine` says now.
    """
    at, measured = result["configuration"], result["machine"]
    rates = {name: measured[name] for name in MEASURED_RATES if name in measured}
    return predict(
        DecoderShape(**result["model"]),
        None if result["spec"] is None else CacheSpec.from_dict(result["spec"]),
        Load(at["visual"], at["prompt"], at["new"]),
        at["budget_bytes"],
        Machine(**rates),
        batch=result["batch"],
        weights=result.get("weights", "bf16"),
    )


def allocated_bytes(shape: DecoderShape, spec: CacheSpec | None, load: Load) -> int:
    """Bytes of one sequence in fixed buffers (`cache.static`): windows are as wide as they get."""
    if spec is None:
        return load.tokens * _token_bytes(shape)
    check_spec(shape.facts, spec)
    counted = {"visual_tokens": load.visual, "text_tokens": load.prompt, "images": load.images}
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
    return kept + (slots + dense) * _token_bytes(shape, spec)


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
        group_bytes = spec.flush_tokens * shape.kv_heads * shape.head_dim * 4
        step += batch * group_bytes * FLUSH_COPIES
    return max(prefill, step) + WORKSPACE_BYTES


def read_bytes(shape: DecoderShape, spec: CacheSpec | None, load: Load) -> StepBytes:
    """Bytes that a step reads after `load.new` new tokens."""
    if spec is None:
        return StepBytes(0, 0, load.tokens * _token_bytes(shape))
    everything = plan(
        shape.facts,
        spec,
        visual_tokens=load.visual,
        text_tokens=load.prompt,
        new_tokens=load.new,
        images=load.images,
    )
    packed, span = everything.codes_bytes + everything.params_bytes, 0
    if isinstance(spec.visual, KVSpec) and load.visual:
        alone = plan(shape.facts, spec, visual_tokens=load.visual, images=load.images)
        span = alone.codes_bytes + alone.params_bytes
    return StepBytes(span, packed - span, everything.dense_bytes)


def _token_bytes(shape: DecoderShape, spec: CacheSpec | None = None) -> int:
    """Bytes of a dense token."""
    of = (shape.head_dim, shape.element_bytes)
    row_bytes = math.prod(of) if spec is None else spec.dense_row_bytes(*of)
    return 2 * shape.layers * shape.kv_heads * row_bytes
