"""Differences between layers: other policies, and codes that layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from duotone.quant.kv_spec import KVSpec
from duotone.quant.spec_base import Record, is_count, is_number, require

# The policies that a rule may change.
RULED = ("visual", "background", "text")


@dataclass(frozen=True)
class LayerRule(Record):
    """Other policies for the layers [start, stop) of a model; None keeps the cache's.

    stop: None for the last layer. Where rules overlap, the later one wins.
    """

    start: int = 0
    stop: int | None = None
    visual: KVSpec | None = None
    background: KVSpec | None = None
    text: KVSpec | None = None

    def __post_init__(self) -> None:
        ok = is_count(self.start) and (self.stop is None or is_count(self.stop))
        ok = ok and (self.stop is None or self.start < self.stop)
        rule = "a layer rule needs 0 <= start < stop"
        require(ok, rule, (self.start, self.stop), "stop=None: to the last layer.")
        for name in RULED:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, KVSpec.from_dict(value))
            else:
                ok = value is None or isinstance(value, KVSpec)
                require(ok, f"LayerRule.{name} must be a KVSpec or None", value, "See CacheSpec.")

    def covers(self, layer: int) -> bool:
        """True where this rule covers `layer`."""
        return self.start <= layer and (self.stop is None or layer < self.stop)


@dataclass(frozen=True)
class Sharing(Record):
    """Cross-layer sharing of codes (XQuant sec. 3.3): runs of layers that store codes once.

    key, value: the first layer whose K or V shares; None: all layers keep their own codes.
    layers: layers per run (the paper's G). dominant: number, in the run, of the layer that stores
    codes (the paper's k). The other layers store their own scale and zero_point and read the
    dominant layer's codes. A run that the model's depth cuts short does not share.
    weights: the paper's gamma, one per layer of the run, sum 1. The dominant layer then stores the
    average of the run's codes, rounded to nearest (`quant.averaging`). None: its own codes.
    """

    key: int | None = None
    value: int | None = None
    layers: int = 2
    dominant: int = 0
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            value = getattr(self, name)
            ok = value is None or is_count(value)
            require(ok, f"Sharing.{name} must be a layer or None", value, "Layers count from 0.")
        ok = is_count(self.layers) and self.layers >= 2
        require(ok, "Sharing.layers must be an integer >= 2", self.layers, "The paper: 2.")
        ok = is_count(self.dominant) and self.dominant < self.layers
        require(ok, "Sharing.dominant must lie in the run", self.dominant, "The paper: 0.")
        if self.weights is not None:
            self._normalise_weights()

    def _normalise_weights(self) -> None:
        ok = isinstance(self.weights, (tuple, list)) and len(self.weights) == self.layers
        ok = ok and all(is_number(weight) and weight >= 0 for weight in self.weights)
        rule = f"Sharing.weights must be None or {self.layers} numbers >= 0, one per layer of a run"
        require(ok, rule, self.weights, "E.g. (0.6, 0.4) for pairs.")
        weights = tuple(float(weight) for weight in self.weights)
        ok = math.isclose(sum(weights), 1, abs_tol=1e-6)
        require(ok, "Sharing.weights must sum to 1", self.weights, "Codes must stay codes.")
        object.__setattr__(self, "weights", weights)

    def source(self, which: Literal["key", "value"], layer: int, depth: int) -> int:
        """Layer whose codes `layer` reads in a model of `depth` layers; itself if it stores."""
        first = getattr(self, which)
        if first is None or layer < first:
            return layer
        start = layer - (layer - first) % self.layers
        return start + self.dominant if start + self.layers <= depth else layer

    def stored_before(self, which: Literal["key", "value"], layer: int, depth: int) -> int:
        """Count the layers before `layer` that are their own `source`."""
        first = getattr(self, which)
        if first is None or layer <= first:
            return layer
        runs = max(0, depth - first) // self.layers
        within, after = layer - first, layer - first - runs * self.layers
        return first + min(runs, (within - self.dominant - 1) // self.layers + 1) + max(0, after)


def layer_rules(
    kinds: Sequence[Mapping[str, KVSpec]],
) -> tuple[dict[str, KVSpec], tuple[LayerRule, ...]]:
    """Find the most frequent policies by name, and a rule for each run of layers with others."""
    common = max(kinds, key=list(kinds).count)
    rules, start = [], 0
    for stop in range(1, len(kinds) + 1):
        if stop == len(kinds) or kinds[stop] != kinds[start]:
            if kinds[start] != common:
                rules.append(LayerRule(start, stop, **kinds[start]))
            start = stop
    return dict(common), tuple(rules)
