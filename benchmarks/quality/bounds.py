"""Bounds of true bits that a preset keeps at short and long spans."""

from duotone import CacheSpec, KVSpec
from duotone.quant.accounting import tensor_bytes

# By bits: {tokens of a span: true bits at most}, parameters included. More bits: about what min/max
# codes with parameters of 16 bits hold.
MOST_BITS = {
    1: {49: 1.6, 256: 1.3, 3328: 1.15},
    2: {49: 2.66, 256: 2.2, 3328: 2.1},
    3: {49: 3.75, 256: 3.2, 3328: 3.1},
    4: {49: 4.66, 256: 4.2, 3328: 4.1},
}
CHANNELS = 128
LAYERS = 8  # of a shallow model, where rules for first layers weigh most


def span_bits(spec: CacheSpec, tokens: int, channels: int = CHANNELS) -> float:
    """True bits of a visual span with parameters. Errors: ValueError for a spec without codes."""
    if not isinstance(spec.visual, KVSpec):
        raise ValueError(f"true bits of a span need a KVSpec; got visual={spec.visual!r}")
    layers = (spec.at_layer(layer) for layer in range(LAYERS))
    return sum(_layer_bits(layer, tokens, channels) for layer in layers) / LAYERS


def _layer_bits(spec: CacheSpec, tokens: int, channels: int) -> float:
    front = tokens if spec.background is None else spec.foreground_of(tokens)
    parts = [(spec.visual, front), (spec.background, tokens - front)]
    held = sum(
        sum(tensor_bytes(tensor, count, channels))
        for part, count in parts
        if part is not None
        for tensor in (part.key, part.value)
    )
    return 8 * held / (2 * tokens * channels)


def within_bounds(spec: CacheSpec, bits: int) -> bool:
    """Return True where a spec holds at most MOST_BITS at all of their lengths."""
    bounds = MOST_BITS.get(bits, {})
    return all(span_bits(spec, tokens) <= most for tokens, most in bounds.items())
