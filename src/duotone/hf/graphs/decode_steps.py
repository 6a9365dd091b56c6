"""Decode steps of one cache: the first as it is, the second captured, later ones replayed.

The first step warms up what a capture must find: compiled kernels, handles of libraries, buffers
that a process keeps. Inputs of a capture are in tensors that stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from duotone.hf.cache.cache import QuantizedCache
from duotone.hf.graphs.host_values import HostValues
from duotone.hf.graphs.rules import INPUTS, settings_of
from duotone.hf.model.cache_argument import CACHE
from duotone.tools.cuda_graph import CudaGraph

# Room for new tokens where a call does not say how many will come, and the most where it does.
FIRST_ROOM, MOST_ROOM = 128, 512
# Room may be more than that if so many bytes of dense tokens hold it.
MOST_BYTES = 2**28
# Answers of up to so many tokens more or less have equal room, and so one capture.
ROOM_MULTIPLE = 64


def first_room(new_tokens: int | None, token_bytes: int) -> int:
    """Tokens that a cache gets room for at first.

    new_tokens: of the call, where it says so. token_bytes: of one dense token per sequence.
    """
    if new_tokens is None:
        return FIRST_ROOM
    rounded = -(-new_tokens // ROOM_MULTIPLE) * ROOM_MULTIPLE
    return min(rounded, max(MOST_ROOM, MOST_BYTES // token_bytes))


class DecodeSteps:
    """Decode steps of one cache from the moment on that it holds still.

    kwargs: arguments of the model's forward pass at the first of them. captures: False where all
    of them run as they are. before: steps before it in this call.
    Errors: ValueError where the cache cannot freeze; then nothing has changed.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: QuantizedCache,
        kwargs: dict[str, Any],
        room: int,
        captures: bool = True,
        before: int = 0,
    ) -> None:
        self.forward: Callable[..., Any] | None = forward
        self.captures, self.before = captures, before
        self.frozen = cache.timeline.hold_still(room)
        # A model may count tokens: a number on the host would be repeated.
        self.count = torch.zeros((), dtype=torch.long, device=cache.device)
        self.owner, self.spec, self.device = weakref.ref(cache), cache.spec, cache.device
        self.settings = settings_of(kwargs)
        given = {name: kwargs.get(name) for name in INPUTS if name in self.settings}
        self.inputs = {name: x.clone() for name, x in given.items() if x is not None}
        self._model = Replayed(self.device, captures)
        self._flush = Replayed(self.device, captures)

    @property
    def taken(self) -> int:
        """Steps of this call so far."""
        return self.before + self.frozen.steps

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.inputs["input_ids"])

    @property
    def is_captured(self) -> bool:
        """True once a step was captured."""
        return self._model.graph is not None

    @property
    def error(self) -> str | None:
        """Why a step or a flush could not be captured, or None."""
        return self._model.error or self._flush.error

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs and of the buffers that they are for."""
        graphs = (replayed.graph for replayed in (self._model, self._flush))
        return self.frozen.nbytes + sum(g.nbytes for g in graphs if g is not None)

    def set_warm(self, is_warm: bool) -> None:
        """Say that an earlier call has warmed up all that these steps launch."""
        if is_warm:
            # Tables of blocks ask the device for their sizes, which a capture must find.
            _ = self.frozen.structure
        for replayed in (self._model, self._flush):
            replayed.is_warm = replayed.is_hoped = is_warm

    def never_capture(self) -> None:
        """Run all later steps as they are."""
        self.captures = self._model.captures = self._flush.captures = False

    def take_over(self, fresh: DecodeSteps, cache: QuantizedCache) -> bool:
        """Take over the tokens of `fresh` into buffers that are alike; False: they are not.

        Our own cache is gone. cache: of `fresh`, before its first step.
        """
        if self.spec != fresh.spec or self.settings != fresh.settings:
            return False
        timeline = cache.timeline
        if not fresh.frozen.move_into(self.frozen, timeline.stores, timeline.slow):
            return False
        timeline.own.hold(fresh.frozen.states)
        self.forward, self.spec = fresh.forward, fresh.spec
        self.frozen, self.owner = fresh.frozen, fresh.owner
        return True

    def rest(self) -> None:
        """Let go of the model until another call takes these steps over."""
        self.forward = None

    @property
    def is_full(self) -> bool:
        """True where one more token needs more room."""
        return self.frozen.steps >= self.frozen.room

    def holds_still(self, cache: QuantizedCache) -> bool:
        """True where nothing else was asked of the cache since the last step."""
        return cache.timeline.frozen is self.frozen

    def changed_settings(self, kwargs: dict[str, Any]) -> list[str]:
        """Names of arguments by which a step of `kwargs` is unlike the first one."""
        settings = settings_of(kwargs)
        names = sorted({*settings, *self.settings})
        return [name for name in names if settings.get(name) != self.settings.get(name)]

    def with_more_room(self, cache: QuantizedCache, left: int | None) -> DecodeSteps:
        """The steps after these, in buffers with room for as many as there were, at most `left`."""
        room = max(self.taken, FIRST_ROOM)
        cache.timeline.thaw()
        kwargs = {**self.settings, **self.inputs}
        room = room if left is None else max(min(room, left), 1)
        more = DecodeSteps(self.forward, cache, kwargs, room, self.captures, self.taken)
        # Kernels are warm: the next step is captured at once.
        more.set_warm(True)
        return more

    def run(self, cache: QuantizedCache, kwargs: dict[str, Any]) -> ModelOutput:
        """One step; `generate` may change the result."""
        with self.frozen.step():
            if self.frozen.decoder.starts_with_flush():
                self._run(self._flush, self.frozen.decoder.flush, cache)
            for name, kept in self.inputs.items():
                kept.copy_(kwargs[name])
            self.count.fill_(self.frozen.length)
            kind, found = self._run(self._model, self._forward, cache)
        fields = {name: x.clone() if isinstance(x, Tensor) else x for name, x in found.items()}
        return kind(**fields, **{CACHE: cache})

    def _run(self, replayed: Replayed, body: Callable[[], Any], cache: QuantizedCache) -> Any:
        self._cache = cache
        try:
            return replayed(body)
        finally:
            del self._cache
            if replayed.error is not None:
                say(cache, f"a step cannot be captured; {replayed.error}")

    def _forward(self) -> tuple[type[ModelOutput], dict[str, Any]]:
        """The model's step on the kept inputs, without a mask: padding is stored nowhere."""
        self.frozen.decoder.advance()
        timeline = self._cache.timeline
        timeline.own.advance()
        given = {**self.settings, **self.inputs, "attention_mask": None}
        timeline.count = self.count
        try:
            out = self.forward(**given, **{CACHE: self._cache})
        finally:
            timeline.count = None
        # The cache belongs to the caller; a result that is kept must not keep it.
        return type(out), {name: x for name, x in out.items() if name != CACHE}


class Replayed:
    """A body that runs as it is once, then is captured and replayed, if it is at all.

    A body that is refused is tried once more, with `HostValues`.
    It does not hold the body, whose owner holds it: buffers are freed with their last user.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self.device, self.captures = device, captures
        self.is_warm, self.graph, self.error = False, None, None
        # True where nobody has seen the body run: then one failure to capture it says nothing.
        self.is_hoped = False
        # Each operation passes through them, so they are for bodies that need them.
        self._values: HostValues | None = None

    def __call__(self, body: Callable[[], Any]) -> Any:
        """The result of `body`, always one function, in tensors that the next call overwrites."""
        if self.captures and self.graph is None and self.is_warm and self.error is None:
            self._try_capture(body)
        if self.graph is None:
            with self._values or nullcontext():
                result, self.is_warm = body(), True
            return result
        self.graph.replay()
        return self.graph.result

    def _try_capture(self, body: Callable[[], Any]) -> None:
        try:
            with self._values or nullcontext():
                self.graph = capture(body, self.device)
        except RuntimeError as error:  # nothing has run; PyTorch names the operation
            if not self.is_hoped:
                self._fail(str(error).partition("\n")[0])
        self.is_hoped = False

    def _fail(self, reason: str) -> None:
        """Try once more with values of the host on the device, then give up."""
        if self._values is None:
            self._values = HostValues()
        else:
            self._values, self.error = None, reason


def capture(body: Callable[[], Any], device: torch.device) -> CudaGraph:
    """A graph of the launches of `body`."""
    return CudaGraph(body, device)


def say(cache: QuantizedCache, reason: str) -> None:
    """Say once per model why decode steps are not replayed."""
    cache.timeline.slow.say(
        "decode of `generate`", "is launched step by step, slower than by CUDA graphs", reason
    )
