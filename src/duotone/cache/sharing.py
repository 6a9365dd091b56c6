"""Cross-layer sharing of codes (XQuant sec. 3.3): set each layer's source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from duotone.cache.runs import run_members
from duotone.quant import CacheSpec

if TYPE_CHECKING:
    from duotone.cache.layer import LayerStore


def share_layers(stores: Sequence[LayerStore], spec: CacheSpec) -> None:
    """Set, for the stores of all layers, the sources of their codes and the runs of averages."""
    of_layer = list(range(len(stores)))
    for which in ("key", "value"):
        runs: dict[int, list[int]] = {}
        for layer in range(len(stores)):
            runs.setdefault(spec.source(which, layer, len(stores)), []).append(layer)
        for source, run in runs.items():
            weights = spec.share and spec.share.weights
            share_codes(which, [stores[layer] for layer in run], stores[source], weights)
            of_layer = _met(of_layer, run)
    for store, first in zip(stores, of_layer, strict=True):
        store.canonical = stores[first].canonical
        if store.shares:
            store.canonical.update(n for n in ("visual", "stream") if store.layout_of(n) is None)


def _met(of_layer: list[int], run: list[int]) -> list[int]:
    """First layer that each layer meets through runs of K and V, with one more run."""
    known = {of_layer[layer] for layer in run}
    return [min(known) if first in known else first for first in of_layer]


def share_codes(
    which: Literal["key", "value"],
    run: Sequence[LayerStore],
    keeper: LayerStore,
    weights: tuple[float, ...] | None = None,
) -> None:
    """Let a run of layers read the codes of K or V that `keeper`, one of them, stores.

    weights: `keeper` stores the average of all layers' codes with them; None: its own.
    """
    for store in run:
        if store is not keeper:
            store.sources[which] = keeper
            keeper.lends.add(which)
    if weights is not None and len(run) > 1:
        for store, member in zip(run, run_members(weights), strict=True):
            store.runs[which] = member
