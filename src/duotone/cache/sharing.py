"""Cross-layer sharing (XQuant sec. 3.3): which layers of a cache read whose codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from duotone.cache.runs import run_members
from duotone.quant import CacheSpec

if TYPE_CHECKING:
    from duotone.cache.layer import LayerStore


def share_layers(stores: Sequence[LayerStore], spec: CacheSpec) -> None:
    """Tell the stores of all layers whose codes they read, and with whom they average theirs."""
    for which in ("key", "value"):
        runs: dict[int, list[LayerStore]] = {}
        for index, store in enumerate(stores):
            runs.setdefault(spec.source(which, index, len(stores)), []).append(store)
        for source, run in runs.items():
            share_codes(which, run, stores[source], spec.share and spec.share.weights)
    for store in stores:
        for name in ("visual", "stream"):
            if store.layout_of(name) is None:
                store.keep_canonical(name)


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
            store.partners.append(keeper)
            keeper.partners.append(store)
            keeper.lends.add(which)
    if weights is not None and len(run) > 1:
        for store, member in zip(run, run_members(weights), strict=True):
            store.runs[which] = member
