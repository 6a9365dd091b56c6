"""Captures of finished `generate` calls, for later calls of this model.

A capture holds the addresses of a cache's buffers, so these are kept with it once the cache is
gone. A later prompt whose buffers would be alike moves into them, and its first step is a replay.
Other prompts of a known batch size are captured at their first step: kernels and libraries are
warm. Captures live as long as the model is what it was (`model_state`), in all `enable` blocks.
"""

from __future__ import annotations

import threading
import weakref

import torch
from transformers import PreTrainedModel

from duotone.hf.cache.cache import QuantizedCache
from duotone.hf.graphs.decode_steps import DecodeSteps
from duotone.hf.graphs.model_state import ModelState
from duotone.quant import CacheSpec
from duotone.tools.cuda_graph import before_captures

# Captures per model, and the part of a device's memory that they may take with their buffers.
MOST_KEPT, MEMORY_SHARE = 4, 1 / 32
# Where a device does not say how much memory it has.
MOST_BYTES = 2**31


class KeptSteps:
    """Steps of finished calls of one model, the last one last."""

    def __init__(self) -> None:
        self._steps: list[DecodeSteps] = []
        self._warm: list[tuple[CacheSpec, str, int]] = []
        self._state: ModelState | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> KeptSteps:
        """The model's own."""
        with _LOCK:
            return _KEPT.setdefault(model, cls())

    def see(self, model: PreTrainedModel) -> bool:
        """Forget captures of what the model was; True where it is what it was."""
        state = ModelState(model)
        with self._lock:
            if is_same := self._state is not None and self._state.is_same(state):
                return is_same
            with before_captures():
                self._state, self._steps, self._warm = state, [], []
        return False

    def like(self, fresh: DecodeSteps, cache: QuantizedCache) -> DecodeSteps:
        """Kept steps that can take over the tokens of `fresh`, or `fresh`.

        cache: of `fresh`, before its first step.
        """
        with self._lock:
            self._drop_unusable()
            fresh.set_warm(_kind(cache, fresh) in self._warm)
            for steps in self._steps:
                if steps.owner() is None and steps.take_over(fresh, cache):
                    self._steps.remove(steps)
                    return steps
        return fresh

    def keep(self, steps: DecodeSteps) -> None:
        """Keep the captures of a call that ended, and forget the oldest ones that are too many."""
        cache = steps.owner()
        steps.rest()
        with self._lock:
            if cache is not None and steps.is_captured:
                if (kind := _kind(cache, steps)) not in self._warm:
                    self._warm.append(kind)
                if not steps.before:  # buffers that grew are like no prompt's
                    self._steps.append(steps)
            self._drop_unusable()

    def forget(self) -> None:
        """Free all captures, and buffers that wait for a later call."""
        with self._lock:
            self._steps = []

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


def _kind(cache: QuantizedCache, steps: DecodeSteps) -> tuple[CacheSpec, str, int]:
    return cache.spec, cache.timeline.impl, steps.batch


# Nothing that is kept holds the model.
_KEPT: weakref.WeakKeyDictionary[PreTrainedModel, KeptSteps] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
