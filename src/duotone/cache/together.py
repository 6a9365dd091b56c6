"""Layers that take in a prompt together, as heads of one layer.

A short prompt's time is that of launches, of which several layers then need as many as one. Their
tokens, spans and moves are equal already, so heads are all that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from duotone.cache.layer import LayerStore, States
from duotone.cache.ledger import AppendPlan
from duotone.quant import CacheSpec, KVSpec, TensorSpec


def can_join(store: LayerStore) -> bool:
    """True for a layer without tokens each of whose heads is packed by itself.

    Bases belong to a layer's heads; products with others round as their sizes have it.
    """
    alone = not (store.shares or store.runs or store.canonical)
    return alone and store.key is None and all(map(_is_by_head, _tensors(store.spec)))


def are_alike(one: LayerStore, other: LayerStore) -> bool:
    """True for layers whose tokens are packed alike, in one kernel's order."""
    specs = one.spec is other.spec or one.spec == other.spec
    return specs and one.layouts == other.layouts


def applied_together(
    stores: Sequence[LayerStore],
    plan: AppendPlan,
    keys: Sequence[States],
    values: Sequence[States],
) -> list[LayerStore]:
    """Stores after a step of `plan`, each with the bits that its own `apply` would give.

    stores: alike, each of which can join. keys, values: of each layer, of one shape and type.
    """
    joined = LayerStore(stores[0].spec, stores[0].layouts)
    joined.apply(plan, torch.cat(tuple(keys), 1), torch.cat(tuple(values), 1))
    return joined.split_heads(len(stores))


def _tensors(spec: CacheSpec) -> Iterator[TensorSpec]:
    for policy in (spec.visual, spec.background, spec.text):
        if isinstance(policy, KVSpec):
            yield from (policy.key, policy.value)


def _is_by_head(spec: TensorSpec) -> bool:
    return spec.heads == "each" and spec.transform is None and spec.factors is None
