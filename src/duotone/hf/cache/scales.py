"""Scales of keys: a cache holds k * w and is asked with q / w, which leaves scores as they are.

`hf.model.key_scales` chooses w. Both products are in the type of the states. So scores differ by
roundings of that type, and not at all where w is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.hf.model.facts import ModelFacts

PREFIX = "key_scales."


class KeyScales:
    """w [kv_heads, 1, head_dim] of each packed layer, or None where keys are kept as they are."""

    def __init__(self, each: Sequence[Tensor | None]) -> None:
        self.each = list(each)

    def copied(self) -> KeyScales:
        """Return scales in tensors of their own."""
        return KeyScales([None if w is None else w.clone() for w in self.each])

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the layers that have one."""
        return [w for w in self.each if w is not None]

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that have one."""
        return [i for i, w in enumerate(self.each) if w is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(w.nbytes for w in self.tensors)

    def of_store(self, index: int, key: Tensor) -> Tensor:
        """Scale keys [batch, kv_heads, tokens, head_dim] as a layer's store holds them."""
        w = self.each[index]
        return key if w is None else (key * w).to(key.dtype)

    def of_model(self, index: int, key: Tensor) -> Tensor:
        """Scale keys of a layer's store back."""
        w = self.each[index]
        return key if w is None else (key / w).to(key.dtype)

    def of_queries(self, index: int, query: Tensor) -> Tensor:
        """Scale queries [batch, q_heads, queries, head_dim] for keys of a layer's store."""
        w = self.each[index]
        if w is None:
            return query
        groups = query.unflatten(1, (len(w), -1))
        return (groups / w[:, None]).to(query.dtype).flatten(1, 2)

    def on(self, device: torch.device) -> KeyScales:
        """Return scales on a device."""
        return KeyScales([None if w is None else w.to(device) for w in self.each])

    def named(self) -> dict[str, Tensor]:
        """Tensors by their names in a file."""
        return {f"{PREFIX}{i}": w for i, w in enumerate(self.each) if w is not None}


def taken_scales(tensors: dict[str, Tensor], facts: ModelFacts, layers: list[int]) -> KeyScales:
    """Take scales out of a file's tensors. layers: those whose scales the file says it has.

    Errors: ValueError for scales that no layer can have, and for others than those of `layers`.
    """
    found: list[Tensor | None] = [tensors.pop(f"{PREFIX}{i}", None) for i in range(facts.layers)]
    has = [i for i, w in enumerate(found) if w is not None]
    if has != layers:
        raise ValueError(
            f"scales of keys must be those of layers {layers!r}; got {has}. Run the prompt again "
            "and save the cache anew"
        )
    for i, (w, shape) in enumerate(zip(found, facts.shapes, strict=True)):
        wanted = (shape.kv_heads, 1, shape.head_dim)
        if w is None:
            continue
        if tuple(w.shape) != wanted or not w.is_floating_point():
            raise ValueError(f"{PREFIX}{i} must be floats {wanted}; got {w.dtype} {tuple(w.shape)}")
        if not bool((w.isfinite() & (w > 0)).all()):
            raise ValueError(f"{PREFIX}{i} must be finite and positive")
    return KeyScales(found)
