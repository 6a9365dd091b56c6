"""Layers that take in a step's tokens together, as heads of one layer.

Launches take most of a short prompt's time, and joined layers need as many as one layer does. All
layers have the same tokens, spans and moves, so only heads and numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from duotone.cache.heads import form_of_pair, join_heads, join_pairs, split_heads, split_pair
from duotone.cache.index import STORES
from duotone.cache.layer import LayerStore, States
from duotone.cache.ledger import AppendPlan
from duotone.quant import CacheSpec, KVSpec, TensorSpec

# A store's tensors outside packed tokens that have a row of heads.
DENSE = ("key", "value", "key_norm", "lag_values")
# Axes of K's and V's groups that are not the inner dimension of attention's products.
OUTER = ("tokens", "channels")


def can_join(store: LayerStore) -> bool:
    """True for a layer each of whose heads is packed by itself.

    Bases belong to a layer's heads, and a matrix product rounds by its size. Kernels refuse large
    scales of groups along the inner dimension: one such layer would take all others along.
    """
    text = store.spec.text
    inner = isinstance(text, KVSpec) and (text.key.along, text.value.along) != OUTER
    alone = store.shares or store.runs or store.canonical or inner
    return not alone and all(map(_is_by_head, _tensors(store.spec)))


def form_of(store: LayerStore, plan: AppendPlan) -> tuple[Any, ...]:
    """Equal for layers that differ in numbers only, in all that `plan` changes."""
    pairs = [form_of_pair(getattr(store, name)) for name in changed(plan)]
    return store.spec, store.layouts, store.dtype, pairs


def changed(plan: AppendPlan) -> list[str]:
    """Names of the packed stores that a prompt or later turn changes."""
    pieces = (plan.visual, plan.background, plan.flush_last)
    return [name for name, piece in zip(STORES, pieces, strict=True) if piece is not None]


def changed_bytes(store: LayerStore, plan: AppendPlan) -> int:
    """Bytes of a layer's tokens that are copied for `plan`."""
    pairs = (getattr(store, name) for name in changed(plan))
    packed = sum(pair.codes_bytes + pair.params_bytes for pair in pairs if pair is not None)
    dense = (getattr(store, name) for name in DENSE)
    return packed + sum(x.nbytes for x in dense if x is not None)


def applied_together(
    stores: Sequence[LayerStore],
    plan: AppendPlan,
    keys: Sequence[States],
    values: Sequence[States],
) -> list[LayerStore]:
    """Stores after a prompt or later turn, each with the bits that its own `apply` would give.

    stores: any one, or several of one form that can join. keys, values: of each layer, those of
    several of one shape and type.
    """
    if len(stores) == 1:
        stores[0].apply(plan, keys[0], values[0])
        return list(stores)
    joined = _joined(stores, plan)
    joined.apply(plan, join_heads(keys), join_heads(values))
    return _split(joined, stores, plan)


def _joined(stores: Sequence[LayerStore], plan: AppendPlan) -> LayerStore:
    first = stores[0]
    joined = LayerStore(first.spec, first.layouts)
    joined.dtype, joined.lag_lengths = first.dtype, first.lag_lengths
    for names, join in ((changed(plan), join_pairs), (DENSE, join_heads)):
        for name in names:
            if getattr(first, name) is not None:
                setattr(joined, name, join([getattr(store, name) for store in stores]))
    return joined


def _split(joined: LayerStore, before: Sequence[LayerStore], plan: AppendPlan) -> list[LayerStore]:
    made = [LayerStore(joined.spec, joined.layouts) for _ in before]
    for names, split in ((changed(plan), split_pair), (DENSE, split_heads)):
        for name in names:
            if (whole := getattr(joined, name)) is not None:
                for store, part in zip(made, split(whole, len(made)), strict=True):
                    setattr(store, name, part)
    for store, old in zip(made, before, strict=True):
        store.dtype, store.lag_lengths = joined.dtype, joined.lag_lengths
        for name in set(STORES) - set(changed(plan)):
            setattr(store, name, getattr(old, name))
    return made


def _tensors(spec: CacheSpec) -> Iterator[TensorSpec]:
    for policy in (spec.visual, spec.background, spec.text):
        if isinstance(policy, KVSpec):
            yield from (policy.key, policy.value)


def _is_by_head(spec: TensorSpec) -> bool:
    return spec.heads == "each" and spec.transform is None and spec.factors is None
