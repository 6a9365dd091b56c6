"""Sensitivity of each layer's K and V: one tensor coarse, everything else at 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duotone import CacheSpec, KVSpec, LayerRule, TensorSpec

from .bits import BitsOf
from .build import Ranking
from .kept import number, numbers
from .objective import Ready, measure

FINE_BITS, COARSE_BITS = 8, 2
WHICH = ("key", "value")


@dataclass(frozen=True)
class Sensitivity:
    """KL(16-bit || cache) in nats with one tensor of one layer at 2 bits, and with none."""

    key: tuple[float, ...]
    value: tuple[float, ...]
    baseline: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], layers: int) -> Sensitivity:
        """Inverse of `asdict`. Errors: ValueError where not all `layers` have a finite number."""
        key, value = (numbers(data, which, layers) for which in ("key", "value"))
        return cls(key, value, number(data, "baseline"))

    @property
    def ranking(self) -> Ranking:
        """Layers of K and of V, the most sensitive first; ties by layer."""
        return {
            which: tuple(sorted(range(len(kl)), key=lambda i, kl=kl: (-kl[i], i)))
            for which, kl in (("key", self.key), ("value", self.value))
        }


def _tensor(bits: int, which: str, spans: bool) -> TensorSpec:
    if spans:
        return TensorSpec(bits)
    return TensorSpec(bits, along="tokens" if which == "key" else "channels", group=32)


def _fine(spans: bool) -> KVSpec:
    return KVSpec(*(_tensor(FINE_BITS, which, spans) for which in WHICH))


def _cache(policy: KVSpec, spans: bool, layers: tuple[LayerRule, ...] = ()) -> CacheSpec:
    if spans:
        return CacheSpec(visual=policy, text="dense", layers=layers)
    return CacheSpec(visual="text", text=policy, layers=layers)


def probe(layer: int | None, which: str, *, spans: bool) -> CacheSpec:
    """Spec with K or V of one layer at 2 bits and everything else at 8.

    spans: visual spans, a scale per channel; else a stream without window on KIVI's axes.
    """
    fine = _fine(spans)
    if layer is None:
        return _cache(fine, spans)
    coarse = fine.replace(**{which: _tensor(COARSE_BITS, which, spans)})
    rule = LayerRule(layer, layer + 1, **{"visual" if spans else "text": coarse})
    return _cache(fine, spans, (rule,))


def measure_sensitivity(
    model: Any,
    batches: Sequence[Ready],
    layers: int,
    *,
    spans: bool,
    of: BitsOf = "visual",
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """One pass over the layers: mean KL over the batches, K and V in turn."""
    probes = [(None, "key"), *((i, which) for which in WHICH for i in range(layers))]
    divergences = []
    for done, (layer, which) in enumerate(probes, start=1):
        spec = probe(layer, which, spans=spans)
        parts = [measure(model, batch, spec, of=of) for batch in batches]
        divergences.append(sum(parts[1:], parts[0]).kl)
        if progress:
            progress(done, len(probes))
    baseline, *rest = divergences
    return Sensitivity(tuple(rest[:layers]), tuple(rest[layers:]), baseline)
