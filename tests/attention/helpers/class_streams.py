"""Streams of classes: quantizers, and a layer that decodes with one."""

import torch
from torch import Tensor

from duotone.attention import decode_attention
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore, flush_all
from duotone.cache.pair import Layouts
from duotone.quant import CacheSpec, KVSpec

from cases import CALIBRATED, SMALL, UNITS

GROUP = 64
SPECS = {
    name: KVSpec(*(spec.replace(group=GROUP) for spec in both))
    for name, both in {"lloyd": CALIBRATED, "small": SMALL, "min/max": UNITS}.items()
}
SPECS["rotated"] = KVSpec(*(x.replace(group=GROUP, transform="hadamard") for x in SMALL))
HEADS, DIM, STEPS = 2, 64, 70
BATCH = (200, 33, 120)


def decode(
    name: str,
    layouts: Layouts | None,
    static: bool,
    device: str = "cpu",
    impl: str = "reference",
) -> tuple[list, list[Tensor]]:
    """(segments, outputs of attention at all steps)."""
    torch.manual_seed(0)
    spec = CacheSpec(visual="text", text=SPECS[name], sink=4, recent=32)
    width = max(BATCH)
    real = torch.arange(width) >= width - torch.tensor(BATCH)[:, None]
    real = real.to(device)
    ledger, store = Ledger(spec, len(BATCH), real.device), LayerStore(spec, layouts)
    store.apply(ledger.plan(torch.zeros_like(real), real), *numbers(width, device))
    frozen = None
    if static:
        places, order = StaticPlaces.of(ledger.state, spec, STEPS)
        frozen = StaticStore(store, places, order)
    outputs = []
    for _ in range(STEPS):
        new = numbers(1, device)
        segments = static_step(frozen, new) if frozen else growing_step(store, ledger, new)
        query = torch.randn(len(BATCH), HEADS * 2, 1, DIM).to(device)
        outputs.append(decode_attention(query, segments, sm_scale=DIM**-0.5, impl=impl))
    return segments, outputs


def numbers(tokens: int, device: str = "cpu") -> list[Tensor]:
    """K and V, numbers of 16 bits."""
    shape = (len(BATCH), HEADS, tokens, DIM)
    return [torch.randn(shape).half().float().to(device) for _ in range(2)]


def growing_step(store: LayerStore, ledger: Ledger, new: list[Tensor]) -> list:
    """Segments after one more token, in buffers that grow."""
    one = torch.ones(len(BATCH), 1, dtype=torch.bool, device=new[0].device)
    store.apply(ledger.plan(~one, one), *new)
    return store.segments(ledger.state)


def static_step(store: StaticStore, new: list[Tensor]) -> list:
    """Segments after one more token, in fixed buffers."""
    flush_all([store])
    store.places.advance()
    store.write(*new)
    return store.segments
