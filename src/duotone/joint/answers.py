"""Answers of the 16-bit model with its 16-bit cache, which all pairs are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from duotone.hf.model.fingerprint import raw_bytes
from duotone.tune.answered import Answered
from duotone.tune.batches import ready, ready_after
from duotone.tune.objective import Ready


class Answers:
    """The 16-bit model's answers by batch: tokens and distributions, without its caches."""

    def __init__(self) -> None:
        self._made: dict[str, Ready] = {}

    def add(self, model: Any, encoded: Mapping[str, Tensor], max_new_tokens: int) -> None:
        """Answer a batch by the 16-bit model."""
        self._made[digest(encoded)] = _alone(ready(model, dict(encoded), max_new_tokens))

    def make_ready(self, model: Any, encoded: Mapping[str, Tensor], max_new_tokens: int) -> Ready:
        """Prepare a batch for another model, which is compared along the same answers."""
        return ready_after(model, dict(encoded), self._made[digest(encoded)])


def digest(encoded: Mapping[str, Tensor]) -> str:
    """Digest of a batch's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(encoded.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(raw_bytes(tensor))
    return found.hexdigest()


def _alone(made: Ready) -> Ready:
    """Drop what only the 16-bit model needs: its inputs and its cache."""
    batch = replace(made.batch, model_inputs={}, pictures_read=[])
    if isinstance(made, Answered):
        return replace(made, batch=batch)
    return replace(made, batch=batch, dense=None, tail={})
