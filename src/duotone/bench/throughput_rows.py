"""Rows of `duotone bench throughput`, as data."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.quant import CacheSpec, scheme


def _with_stream(bits: int, stream: str) -> CacheSpec:
    """`bits` for visual spans, a stream of 2 bits for text and generated tokens."""
    return scheme(stream, bits=2).replace(visual=scheme("minmax", bits=bits).visual)


@dataclass(frozen=True)
class Row:
    """A row of the comparison. cache: None is 16 bit. weights: a key of step_time.WEIGHT_BITS.

    library: instead of `cache`, a backend of transformers' own quantized cache; the search for its
        largest batch begins where `cache` would have it.
    """

    cache: CacheSpec | None = None
    weights: str = "bf16"
    library: str | None = None


# Rows that the papers have come first.
ROWS = {
    "16-bit": Row(),
    "1-bit visual": Row(scheme("minmax", bits=1)),
    "1-bit visual, 2-bit text": Row(_with_stream(1, "kivi")),
    "1-bit visual, calibrated": Row(scheme("calibquant", bits=1)),
    "2-bit visual": Row(scheme("minmax", bits=2)),
    "4-bit visual": Row(scheme("minmax", bits=4)),
    "kivi-2": Row(scheme("kivi", bits=2)),
    "xquant": Row(scheme("xquant", kq=30, vq=2, km=32, vm=16)),
    "transformers quanto-2": Row(scheme("kivi", bits=2), library="quanto"),
    "transformers hqq-2": Row(scheme("kivi", bits=2), library="hqq"),
    "16-bit, W8A8": Row(weights="w8a8"),
    "1-bit visual, 2-bit text, W8A8": Row(_with_stream(1, "kivi"), "w8a8"),
    "1-bit visual, our 2-bit text": Row(_with_stream(1, "duotone-stream")),
    "1-bit visual, our 2-bit text, W8A8": Row(_with_stream(1, "duotone-stream"), "w8a8"),
}
# Without MQuant's rows, and without schemes that quantize everything: one budget suffices there.
MAIN_ROWS = tuple(ROWS)[:6]
