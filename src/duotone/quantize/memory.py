"""Bytes of the parts of a model, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from duotone.weights.equivalences.module_map import WeightMap

from .units import units_of

EMBEDDING, REST = "embedding and head", "rest"


def part_bytes(model: nn.Module, found: WeightMap) -> dict[str, int]:
    """{part: bytes of all its tensors}, shared ones once, and "total"."""
    units = units_of(model, found, ("vision", "projector", "language"))
    homes = [(unit.path, unit.part) for unit in units]
    homes += [(found.embedding, EMBEDDING), (found.head, EMBEDDING)]
    sizes = dict.fromkeys(("vision", "projector", "language", EMBEDDING, REST), 0)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            sizes[_home(name, homes)] += tensor.numel() * tensor.element_size()
    return sizes | {"total": sum(sizes.values())}


def _home(name: str, homes: Sequence[tuple[str, str]]) -> str:
    return next((part for path, part in homes if name.startswith(f"{path}.")), REST)
