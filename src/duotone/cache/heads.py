"""Heads of several layers side by side, in data classes with tensors [batch, kv_heads, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.pair import PackedPair


@runtime_checkable
class HasHeads(Protocol):
    """A frozen data class; other tensors, and tables of blocks, are of the sequences."""

    @property
    def by_head(self) -> dict[str, Tensor]:
        """Tensors [batch, kv_heads, ...], by the names of their fields."""
        ...


Part = TypeVar("Part", bound=HasHeads)


def split_heads(x: Shaped[Tensor, "batch heads *rest"], layers: int) -> Sequence[Tensor]:
    """Heads of each of so many layers, which lie one after the other; all parts are contiguous.

    They share one storage.
    """
    by_layer = x.unflatten(1, (layers, -1)).transpose(0, 1).flatten(0, 1)
    return by_layer.contiguous().split(len(x))


def join_heads(parts: Sequence[Shaped[Tensor, "batch heads *rest"]]) -> Tensor:
    """Inverse of `split_heads`."""
    return torch.cat(tuple(parts), 1)


def split_pair(pair: PackedPair, layers: int) -> list[PackedPair]:
    """Give each of so many layers its heads."""
    own = pair.records
    records = [None] * layers if own is None else _split(own, layers)
    both = (_split(pair.key, layers), _split(pair.value, layers))
    return [PackedPair(*parts) for parts in zip(*both, records, strict=True)]


def join_pairs(pairs: Sequence[PackedPair]) -> PackedPair:
    """Inverse of `split_pair`, for pairs of one form."""
    records = None if pairs[0].records is None else _join([pair.records for pair in pairs])
    both = ([getattr(pair, name) for pair in pairs] for name in ("key", "value"))
    return PackedPair(*map(_join, both), records)


def form_of_pair(pair: PackedPair | None) -> tuple[Any, ...] | None:
    """Everything but the content of tensors and tables: equal for pairs that can be joined."""
    if pair is None:
        return None
    return tuple(_form(part) for part in (pair.key, pair.value, pair.records))


def _split(whole: Part, layers: int) -> list[Part]:
    names, tensors = whole.by_head.keys(), whole.by_head.values()
    each = zip(*(split_heads(x, layers) for x in tensors), strict=True)
    parts = [dict(zip(names, part, strict=True)) for part in each] if names else [{}] * layers
    return [replace(whole, **part) for part in parts]


def _join(parts: Sequence[Part]) -> Part:
    names = parts[0].by_head
    return replace(parts[0], **{n: join_heads([part.by_head[n] for part in parts]) for n in names})


def _form(x: HasHeads | None) -> tuple[Any, ...]:
    """Type, shapes and everything that is neither a tensor nor a table."""
    if x is None:
        return ()
    held = (getattr(x, f.name) for f in fields(x))
    rest = [value for value in held if not isinstance(value, (Tensor, BlockTable))]
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in x.by_head.items()}
    return type(x), rest, shapes
