"""What `duotone bench throughput` compares, as data."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.quant import CacheSpec, scheme

FP8 = "float8_e4m3fn"


def _with_stream(bits: int, window: int = 128) -> CacheSpec:
    """`bits` for visual spans, KIVI's 2 bits behind a window for text and generated tokens."""
    visual = scheme("minmax", bits=bits).visual
    return scheme("kivi", bits=2).replace(visual=visual, recent=window)


@dataclass(frozen=True)
class Row:
    """What is compared. cache: None is 16 bit. weights: a key of step_time.WEIGHT_BITS.

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
    "1-bit visual, 2-bit text": Row(_with_stream(1)),
    "1-bit visual, calibrated": Row(scheme("calibquant", bits=1)),
    "2-bit visual": Row(scheme("minmax", bits=2)),
    "4-bit visual": Row(scheme("minmax", bits=4)),
    "kivi-2": Row(scheme("kivi", bits=2)),
    "xquant": Row(scheme("xquant", kq=30, vq=2, km=32, vm=16)),
    "transformers quanto-2": Row(scheme("kivi", bits=2), library="quanto"),
    "transformers hqq-2": Row(scheme("kivi", bits=2), library="hqq"),
    "16-bit, W8A8": Row(weights="w8a8"),
    "1-bit visual, 2-bit text, W8A8": Row(_with_stream(1), "w8a8"),
    "1-bit visual, 2-bit text, window 32, W8A8": Row(_with_stream(1, window=32), "w8a8"),
    "1-bit visual, 2-bit text, fp8 window": Row(_with_stream(1).replace(dense_dtype=FP8)),
    "1-bit visual, 2-bit text, fp8 window, W8A8": Row(
        _with_stream(1).replace(dense_dtype=FP8), "w8a8"
    ),
}
# Without the schemes that quantize everything, which one budget is enough for, and MQuant's.
MAIN_ROWS = tuple(ROWS)[:6]
