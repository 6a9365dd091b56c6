"""The time of a decode step: its roofline, and the kernels' share of it on one H200.

A step reads all weights once and every sequence's cache once, and multiplies. On a machine that
copies `c` bytes and multiplies `f` numbers per second it takes no less than

    max(weights / c, operations / f) + caches / c

With larger batches the first term grows. Beyond some 200 sequences, an H200 multiplies longer than
it reads weights, and a smaller cache then saves less than its share of bytes. Weights and
activations of 8 bits (MQuant) halve both sides of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from duotone.planning.shapes import DecoderShape
from duotone.quant import CacheSpec

# Bits of a weight in the blocks of a decoder; the head is 16 bit in all. Products of w8a8 and w4a8
# are of 8-bit integers.
WEIGHT_BITS = {"bf16": 16, "w8a8": 8, "w4a8": 4}


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, and the remaining costs of a step.

    copy_bytes_per_s, operations_per_s: measured by a large copy and a large product in bfloat16.
    integer_operations_per_s: the most that int8 products of ours reach (docs/mquant.md), which is
        more than cuBLASLt's.
    product_share, integer_share: shares of the latter two that products with a batch's few rows
        reach.
    layer_s: time per layer that neither bytes nor operations explain (small kernels, tails).
    dense_layer_s, segment_s: such times of attention to a 16-bit cache, and to each segment of a
        packed cache.
    *_share: attention's share of the copy bandwidth. dense: on a 16-bit cache alone. segment: on
        16-bit tokens next to packed ones. span: on packed spans. stream: on packed groups.
    shared_share: of packed groups whose codes layers share, which come in pieces.
    wide_share: factor of span and segment where kv heads have more than four q heads.

    Fitted to the measurements in results/throughput, of one H200.
    """

    copy_bytes_per_s: float = 4.25e12
    operations_per_s: float = 800e12
    integer_operations_per_s: float = 1600e12
    product_share: float = 0.77
    integer_share: float = 0.7
    layer_s: float = 26e-6
    dense_layer_s: float = 20e-6
    segment_s: float = 8e-6
    dense_share: float = 0.98
    segment_share: float = 1.0
    span_share: float = 0.81
    stream_share: float = 0.71
    shared_share: float = 0.46
    wide_share: float = 0.73


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one sequence that a step reads: packed spans, packed stream, 16-bit tokens."""

    span: int
    stream: int
    dense: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.span + self.stream + self.dense


def roofline_seconds(
    shape: DecoderShape, read: StepBytes, batch: int, machine: Machine, weights: str = "bf16"
) -> float:
    """Seconds by the formula of this file. weights: a key of WEIGHT_BITS."""
    products = max(_product_limits(shape, batch, machine, weights))
    return products + batch * read.total / machine.copy_bytes_per_s


def step_seconds(
    shape: DecoderShape,
    spec: CacheSpec | None,
    read: StepBytes,
    batch: int,
    machine: Machine,
    weights: str = "bf16",
) -> float:
    """Seconds with the kernels' shares and the remaining costs of layers. spec: None for 16 bit."""
    if spec is None:
        copied, beside_s = read.dense / machine.dense_share, machine.dense_layer_s
    else:
        wide = machine.wide_share if shape.q_heads > 4 * shape.kv_heads else 1.0
        stream_share = machine.stream_share if spec.share is None else machine.shared_share
        copied = read.span / (machine.span_share * wide) + read.stream / stream_share
        copied += read.dense / (machine.segment_share * wide)
        beside_s = machine.segment_s * sum(n > 0 for n in (read.span, read.stream, read.dense))
    attention = batch * copied / machine.copy_bytes_per_s
    shares = (machine.product_share, machine.integer_share)
    products = _product_limits(shape, batch, machine, weights, *shares)
    # Near the batch at which both limits are equal, neither is met.
    both = sum(seconds**3 for seconds in products) ** (1 / 3)
    return both + attention + shape.layers * (machine.layer_s + beside_s)


def _product_limits(
    shape: DecoderShape,
    batch: int,
    machine: Machine,
    weights: str,
    share: float = 1.0,
    integer_share: float = 1.0,
) -> tuple[float, float]:
    """Seconds of reading all weights, and of multiplying with them at shares of the rates."""
    head = shape.hidden * shape.vocab
    blocks = shape.read_weights - head
    read = blocks * WEIGHT_BITS[weights] / 16 * shape.element_bytes + head * shape.element_bytes
    dense, integer = share * machine.operations_per_s, machine.integer_operations_per_s
    rate = dense if weights == "bf16" else integer_share * integer
    return read / machine.copy_bytes_per_s, 2 * batch * (blocks / rate + head / dense)
