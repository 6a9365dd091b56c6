"""Objects that differ in the content of their tensors only.

A captured launch holds addresses, and numbers that the host took from shapes, specs and tables. If
two caches are alike, the tensors of one can be copied into the other's, whose launches are then
right for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.places import StaticPlaces
from duotone.quant import CacheSpec, KVSpec, TensorSpec

LEAVES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
SPECS = (CacheSpec, KVSpec, TensorSpec)
# What the host takes from a table of blocks.
OF_TABLES = ("offsets", "sizes", "longest", "tokens", "is_uniform")
# Parts of places that differ from prompt to prompt and are in no launch.
OF_PROMPTS = ("movable", "evicted")


@dataclass
class Structure:
    """Everything of an object but the content of its tensors, and the tensors in its order.

    Attributes that are no fields of a data class are left out, for they repeat others. So are
    specs, whose tensors belong to the caller: compare these apart.
    Errors: TypeError for parts that are no tensors, numbers, collections or objects of this
    library.
    """

    facts: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Any) -> Structure:
        """The structure of `root`; waits for the device where a table's sizes are not known."""
        made = cls()
        made._enter(root)
        return made

    def is_like(self, other: Structure) -> bool:
        """True where the two differ in the content of tensors only."""
        return self.facts == other.facts

    def copy_from(self, other: Structure) -> None:
        """Take over the content of a structure that is alike."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, other.tensors)
        self.forget_derived()

    def reorder(self, index: Int[Tensor, " batch"], but: Collection[int] = ()) -> None:
        """Make sequence b a copy of sequence index[b]; the first axis of every tensor is `batch`.

        but: ids of tensors that are left as they are.
        """
        kept = [x for x in self._buffers() if id(x) not in but]
        torch._foreach_copy_(kept, [x.index_select(0, index) for x in kept])
        self.forget_derived()

    def forget_derived(self) -> None:
        """Let tables derive anew what follows from their offsets."""
        for table in self.tables:
            for name in vars(table).keys() - {"offsets", *OF_TABLES}:
                del vars(table)[name]

    def _buffers(self) -> list[Tensor]:
        """Tensors without those that are views of another one."""
        whole: dict[range, Tensor] = {}
        for x in sorted(self.tensors, key=_span_bytes, reverse=True):
            taken = range(x.data_ptr(), x.data_ptr() + _span_bytes(x))
            if x.numel() and not any(
                taken.start in other and taken[-1] in other for other in whole
            ):
                whole[taken] = x
        return list(whole.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; views of one buffer count once."""
        buffers = (x.untyped_storage() for x in self.tensors)
        return sum({kept.data_ptr(): kept.nbytes() for kept in buffers}.values())

    def _enter(self, x: Any) -> None:
        if isinstance(x, LEAVES):
            self.facts.append(x)
        elif isinstance(x, SPECS):
            return
        elif id(x) in self._seen:
            self.facts.append(("again", self._seen[id(x)]))
        elif isinstance(x, Tensor):
            self._seen[id(x)] = len(self._seen)
            self.facts.append((x.shape, x.dtype, x.device, x.stride()))
            self.tensors.append(x)
        else:
            self._seen[id(x)] = len(self._seen)
            self.facts.append(type(x))
            if isinstance(x, BlockTable):
                self.tables.append(x)
            for name, part in _parts(x):
                self.facts.append(name)
                self._enter(part)
            self.facts.append("end")


def _span_bytes(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    steps = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size() if x.numel() else 0


def _parts(x: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        yield from x.items()
    elif isinstance(x, (list, tuple)):
        yield from enumerate(x)
    elif isinstance(x, (set, frozenset)):
        yield from enumerate(sorted(x))
    elif isinstance(x, BlockTable):
        yield from ((name, getattr(x, name)) for name in OF_TABLES)
    elif type(x).__module__.startswith("duotone."):
        names = [part.name for part in fields(x)] if is_dataclass(x) else list(vars(x))
        left_out = OF_PROMPTS if isinstance(x, StaticPlaces) else ()
        yield from ((name, getattr(x, name)) for name in names if name not in left_out)
    else:
        raise TypeError(f"{type(x)} holds parts that launches may depend on, in unknown ways")
