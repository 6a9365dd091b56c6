"""True bits per element: every stored bit of codes, signs, scales and zero-points, by formula.

The containers of `duotone.cache` count the bytes that they hold; tests compare both numbers.
"""

from __future__ import annotations

from duotone.quant.affine import has_signs
from duotone.quant.classes import CLASS_BITS, class_counts, coded_channels
from duotone.quant.factors import BALANCED, NORM
from duotone.quant.grouping import group_sizes
from duotone.quant.packing import packed_bytes
from duotone.quant.slots import PARAM_BYTES, has_slot, slot_bytes
from duotone.quant.spec import CacheSpec, KVSpec, TensorSpec


def tensor_bytes(spec: TensorSpec, tokens: int, channels: int) -> tuple[int, int]:
    """(codes_bytes, params_bytes) of one span of one kv head, less `token_bytes`.

    A plane of signs counts as codes, a slot that a hybrid's zero_points and signs share
    (`quant.slots`) as parameters. A hybrid's bit per group for its mode is packed row by row.
    """
    size = group_sizes(spec, tokens, channels)
    rows = -(-tokens // size.tokens) if tokens else 0
    factors = _factor_bytes(spec, tokens, channels)
    if spec.classes:
        codes, params = _class_bytes(spec, tokens, rows, channels)
        return codes, params + factors
    columns = -(-channels // size.channels)
    one = PARAM_BYTES[spec.param_dtype]
    codes, per_group = tokens * packed_bytes(channels, spec.bits), one
    if has_slot(spec):
        per_group += slot_bytes(spec, channels)
    else:
        per_group += one if spec.mapping != "symmetric" else 0
        codes += tokens * packed_bytes(channels, 1) if has_signs(spec) else 0
    modes = packed_bytes(columns, 1) if spec.mapping == "hybrid" else 0
    return codes, rows * (columns * per_group + modes + shared_bytes(spec)) + factors


def _factor_bytes(spec: TensorSpec, tokens: int, channels: int) -> int:
    """Bytes of factors of one kv head; norms belong to all of them (`token_bytes`)."""
    if spec.factors != BALANCED:
        return 0
    numbers = tokens
    if spec.along == "channels" and tokens:
        numbers = -(-tokens // (spec.tile or tokens)) * channels
    return numbers * PARAM_BYTES[spec.param_dtype]


def token_bytes(spec: TensorSpec, tokens: int) -> int:
    """Bytes of one span that its kv heads share: norms of tokens."""
    return tokens * PARAM_BYTES[spec.param_dtype] if spec.factors == NORM else 0


def _class_bytes(spec: TensorSpec, tokens: int, rows: int, channels: int) -> tuple[int, int]:
    """(codes_bytes, params_bytes) with classes: scales of coded channels; means, numbers of all."""
    counts = class_counts(spec, channels)
    codes = tokens * sum(packed_bytes(count, bits) for bits, count in counts)
    parameters = coded_channels(spec, channels) + channels
    numbers = packed_bytes(channels, CLASS_BITS)
    each = parameters * PARAM_BYTES[spec.param_dtype]
    return codes, rows * (each + numbers + shared_bytes(spec))


def shared_bytes(spec: TensorSpec) -> int:
    """Bytes of the exponents that the scales and the zero-points of a block share."""
    return 2 if spec.param_dtype == "float8" else 0


def bits_per_element(spec: TensorSpec, tokens: int, channels: int) -> float:
    """True bits per element of a span of `tokens` x `channels`, every byte counted.

    Example: 1 bit with fp16 scale and zero_point over 256 tokens is 1 + 32 / 256 = 1.125.
    """
    if tokens < 1 or channels < 1:
        raise ValueError(f"a span needs tokens and channels >= 1; got {tokens} x {channels}.")
    return 8 * sum(tensor_bytes(spec, tokens, channels)) / (tokens * channels)


def span_bits(spec: CacheSpec, tokens: int, channels: int, layers: int) -> float:
    """True bits per number of a visual span of one kv head, mean over layers, parts included.

    Errors: ValueError for a spec without codes of visual tokens.
    """
    if not isinstance(spec.visual, KVSpec):
        raise ValueError(f"true bits of a span need a KVSpec; got visual={spec.visual!r}")
    each = (_layer_bytes(spec.at_layer(layer), tokens, channels) for layer in range(layers))
    return 8 * sum(each) / (2 * layers * tokens * channels)


def _layer_bytes(spec: CacheSpec, tokens: int, channels: int) -> int:
    front = tokens if spec.background is None else spec.foreground_of(tokens)
    parts = [(spec.visual, front), (spec.background, tokens - front)]
    return sum(
        sum(tensor_bytes(tensor, count, channels))
        for part, count in parts
        if part is not None
        for tensor in (part.key, part.value)
    )
