"""True bits per element: every stored bit of codes, signs, scales and zero-points, by formula.

The containers of `duotone.cache` count the bytes they really hold; tests hold the two equal.
"""

from __future__ import annotations

from duotone.quant.classes import CLASS_BITS, class_counts, coded_channels
from duotone.quant.grouping import group_sizes
from duotone.quant.packing import packed_bytes
from duotone.quant.spec import TensorSpec

PARAM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def tensor_bytes(spec: TensorSpec, tokens: int, channels: int) -> tuple[int, int]:
    """(codes_bytes, params_bytes) of one span of one kv head.

    Signs (symmetric and hybrid mapping) are a bit plane of their own and count as codes. A hybrid
    stores a zero_point for every group and one bit per group for its mode, packed row by row.
    """
    size = group_sizes(spec, tokens, channels)
    rows = -(-tokens // size.tokens) if tokens else 0
    if spec.classes:
        return _class_bytes(spec, tokens, rows, channels)
    columns = -(-channels // size.channels)
    codes = tokens * packed_bytes(channels, spec.bits)
    parameters = 1 if spec.mapping == "symmetric" else 2
    params = rows * columns * parameters * PARAM_BYTES[spec.param_dtype]
    if spec.mapping != "asymmetric":
        codes += tokens * packed_bytes(channels, 1)
    if spec.mapping == "hybrid":
        params += rows * packed_bytes(columns, 1)
    return codes, params


def _class_bytes(spec: TensorSpec, tokens: int, rows: int, channels: int) -> tuple[int, int]:
    """A scale for coded channels only, a mean for all, a packed class number for each."""
    counts = class_counts(spec, channels)
    codes = tokens * sum(packed_bytes(count, bits) for bits, count in counts)
    parameters = coded_channels(spec, channels) + channels
    numbers = packed_bytes(channels, CLASS_BITS)
    return codes, rows * (parameters * PARAM_BYTES[spec.param_dtype] + numbers)


def bits_per_element(spec: TensorSpec, tokens: int, channels: int) -> float:
    """True bits per element of a span of `tokens` x `channels`, every byte counted.

    Example: 1 bit with fp16 scale and zero_point over 256 tokens is 1 + 32 / 256 = 1.125.
    """
    if tokens < 1 or channels < 1:
        raise ValueError(f"a span needs tokens and channels >= 1; got {tokens} x {channels}.")
    return 8 * sum(tensor_bytes(spec, tokens, channels)) / (tokens * channels)
