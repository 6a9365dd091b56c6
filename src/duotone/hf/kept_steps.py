"""Captures of finished `generate` calls, for later calls of this model.

A capture holds the addresses of a cache's buffers, so these are kept with it once the cache is
gone. A later prompt whose buffers would be alike moves into them, and its first step is a replay.
Any other prompt of this batch size is captured at its first step: kernels and libraries are warm.
"""

from __future__ import annotations

import threading

import torch

from duotone.hf.decode_steps import DecodeSteps, HoldsStill
from duotone.quant import CacheSpec

# Captures per model, and the part of a device's memory that they may take with their buffers.
MOST_KEPT, MEMORY_SHARE = 2, 1 / 32
# Where a device does not say how much memory it has.
MOST_BYTES = 2**31


class KeptSteps:
    """Steps of finished calls, the last one last."""

    def __init__(self) -> None:
        self._steps: list[DecodeSteps] = []
        self._warm: list[tuple[CacheSpec, str, int]] = []
        self._lock = threading.Lock()

    def like(self, fresh: DecodeSteps, cache: HoldsStill) -> DecodeSteps:
        """Kept steps that can take over the tokens of `fresh`, or `fresh`.

        cache: of `fresh`, before its first step.
        """
        with self._lock:
            self._drop_unusable()
            fresh.set_warm(any(_is_same(w, _kind(cache, fresh)) for w in self._warm))
            for steps in self._steps:
                if steps.owner() is None and steps.take_over(fresh, cache):
                    self._steps.remove(steps)
                    return steps
        return fresh

    def keep(self, steps: DecodeSteps) -> None:
        """Keep the captures of a call that ended, and forget the oldest ones that are too many."""
        cache = steps.owner()
        with self._lock:
            if cache is not None and steps.is_captured:
                kind = _kind(cache, steps)
                if not any(_is_same(kind, known) for known in self._warm):
                    self._warm.append(kind)
                if not steps.before:  # buffers that grew are like no prompt's
                    self._steps.append(steps)
            self._drop_unusable()

    def keep_batch(self, batch: int) -> None:
        """Forget captures of other batch sizes."""
        with self._lock:
            self._steps = [steps for steps in self._steps if steps.batch == batch]

    @property
    def nbytes(self) -> int:
        """Bytes of the captures and of all buffers that they are for."""
        with self._lock:
            return sum(steps.nbytes for steps in self._steps)

    def _drop_unusable(self) -> None:
        usable, room = [], None
        for steps in reversed(self._steps):
            room = most_bytes(steps.device) if room is None else room
            room -= steps.nbytes
            if room >= 0 and steps.frozen.is_usable and len(usable) < MOST_KEPT:
                usable.append(steps)
        self._steps = usable[::-1]


def most_bytes(device: torch.device) -> float:
    """Bytes that captures and their buffers may take on a device."""
    if device.type != "cuda":
        return MOST_BYTES
    return torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE


def _kind(cache: HoldsStill, steps: DecodeSteps) -> tuple[CacheSpec, str, int]:
    return cache.spec, cache.impl, steps.batch


def _is_same(one: tuple, other: tuple) -> bool:
    # A spec is compared as an object: it may hold tensors.
    return one[0] is other[0] and one[1:] == other[1:]
