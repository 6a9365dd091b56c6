"""Bytes of the parts of a model, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from duotone.hf.weights.units import units_of
from duotone.weights.equivalences.module_map import WeightMap
from duotone.weights.methods.rule import ALL_PARTS, HEAD, PARTS

EMBEDDING, REST = "embedding", "rest"


def part_bytes(model: nn.Module, found: WeightMap) -> dict[str, int]:
    """{part: bytes of all its tensors} and "total"; a tied head counts as embedding."""
    homes = [(unit.path, unit.part) for unit in units_of(model, found, ALL_PARTS)]
    homes.append((found.embedding, EMBEDDING))
    sizes = dict.fromkeys((*PARTS, EMBEDDING, HEAD, REST), 0)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            sizes[_home(name, homes)] += tensor.numel() * tensor.element_size()
    return sizes | {"total": sum(sizes.values())}


def _home(name: str, homes: Sequence[tuple[str, str]]) -> str:
    return next((part for path, part in homes if name.startswith(f"{path}.")), REST)
