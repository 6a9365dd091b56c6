"""Specs of small groups and windows: few generated tokens make groups leave them."""

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec

TWO = TensorSpec(2)
VISUAL = CacheSpec(visual=KVSpec(TWO, TWO), tau=(0, 1))
STREAM = CacheSpec(
    visual="text",
    text=KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8)),
    sink=2,
    recent=3,
)
MIXED = STREAM.replace(visual=KVSpec(TWO, TensorSpec(2, along="channels")), ranges="run")
SPECS = {"visual": VISUAL, "stream": STREAM, "mixed": MIXED}
# Schemes that every model may have.
NAMES = [name for name, entry in duotone.SCHEMES.items() if entry.model is None]


def small(name: str) -> CacheSpec:
    """A scheme with short windows."""
    spec = duotone.scheme(name)
    return spec.replace(sink=min(spec.sink, 3), recent=min(spec.recent, 9))
