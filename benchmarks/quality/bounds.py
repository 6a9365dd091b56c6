"""Bounds of true bits that a preset keeps at short and long spans."""

from duotone import CacheSpec
from duotone.quant.accounting import span_bits

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


def within_bounds(spec: CacheSpec, bits: int) -> bool:
    """Return True where a spec holds at most MOST_BITS at all of their lengths."""
    bounds = MOST_BITS.get(bits, {})
    held = ((span_bits(spec, tokens, CHANNELS, LAYERS), most) for tokens, most in bounds.items())
    return all(bits <= most for bits, most in held)
