"""Decode steps of `generate` as replays of one CUDA graph.

After its prompt a cache holds still: fixed buffers with room for more tokens (`hf.frozen`). The
first step runs as it is and warms up what a capture must find. The second one is captured, with its
inputs in tensors that stay; it and all later ones are replays. Where the room is full, the cache
gets more of it, and the step is captured anew.

Sampling, streaming, stopping and logits processors are `generate`'s own and run between the
replays. What a graph cannot do runs step by step, as without graphs (`graph_rules`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from duotone.cuda_graph import CudaGraph
from duotone.hf.graph_rules import INPUTS, is_decode_step, reason_against, settings_of

if TYPE_CHECKING:
    from duotone.hf.cache import QuantizedCache

# Room for new tokens where a call does not say how many will come, and the most to begin with.
FIRST_ROOM, MOST_ROOM = 128, 512
# Shorter answers end before a capture has paid for itself.
FEW_TOKENS = 4

_LOCAL = threading.local()


def current_call() -> DecodeCall | None:
    """The `generate` call that runs in this thread, if its steps may be captured."""
    return getattr(_LOCAL, "call", None)


class DecodeCall:
    """One call of `generate`, whose decode steps are captured where that is possible.

    forward: the model's own forward pass. new_tokens: the most that the call makes, if it says so.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Callable[..., Any], new_tokens: int | None
    ) -> None:
        self.model, self.forward, self.new_tokens = model, forward, new_tokens
        self.steps: DecodeSteps | None = None
        # True while the model runs a step that this call has claimed.
        self.claimed = False
        self._is_over = new_tokens is not None and new_tokens < FEW_TOKENS

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this thread's steps of the model may be captured."""
        before, _LOCAL.call = current_call(), self
        try:
            yield
        finally:
            _LOCAL.call = before

    def claims(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True for a step that `step` runs; then nobody else may begin it.

        args, kwargs: of the model's forward pass.
        """
        self.claimed = (
            not self._is_over
            and model is self.model
            and not args
            and is_decode_step(model, kwargs)
            and self._is_ready(kwargs)
        )
        return self.claimed

    def step(self, kwargs: dict[str, Any]) -> ModelOutput:
        """Run a claimed step: logits of one more token per sequence."""
        cache = kwargs["past_key_values"]
        if self.steps.is_full:
            with torch.inference_mode(False), torch.no_grad():
                self.steps = self.steps.with_more_room(cache, self._left)
        return self.steps.run(cache, kwargs)

    def _is_ready(self, kwargs: dict[str, Any]) -> bool:
        """Freeze the cache at its first decode step; see that it is frozen at later ones."""
        cache = kwargs["past_key_values"]
        if self.steps is not None:
            # Something else was asked of the cache meanwhile: beams, tokens that are taken back.
            return self.steps.goes_on(cache, kwargs) or self._end()
        try:
            if (reason := reason_against(self.model)) is not None:
                raise ValueError(reason)
            room = FIRST_ROOM if self.new_tokens is None else min(self.new_tokens, MOST_ROOM)
            with torch.inference_mode(False), torch.no_grad():
                self.steps = DecodeSteps(self.forward, cache, kwargs, room)
        except ValueError as error:
            _say(cache, str(error))
            return self._end()
        return True

    @property
    def _left(self) -> int | None:
        return None if self.new_tokens is None else self.new_tokens - self.steps.taken

    def _end(self) -> bool:
        self._is_over, self.steps = True, None
        return False


class DecodeSteps:
    """Decode steps of one cache from the moment on that it holds still.

    kwargs: arguments of the model's forward pass at the first of them. taken: steps before it in
    this call.
    Errors: ValueError where the cache cannot freeze; then nothing has changed.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: QuantizedCache,
        kwargs: dict[str, Any],
        room: int,
        before: int = 0,
    ) -> None:
        self.forward, self.before = forward, before
        self.frozen = cache.hold_still(room)
        self.settings = settings_of(kwargs)
        self.inputs = {name: kwargs[name].clone() for name in INPUTS if name in self.settings}
        device, decoder = cache.device, self.frozen.decoder
        self._model = Replayed(self._forward, device)
        self._flush = Replayed(decoder.flush, device)

    @property
    def taken(self) -> int:
        """Steps of this call so far."""
        return self.before + self.frozen.steps

    @property
    def is_full(self) -> bool:
        """True where one more token needs more room."""
        return self.frozen.steps >= self.frozen.room

    def goes_on(self, cache: QuantizedCache, kwargs: dict[str, Any]) -> bool:
        """True where a step of `kwargs` is like the first one, and the cache still holds still."""
        return cache.frozen is self.frozen and settings_of(kwargs) == self.settings

    def with_more_room(self, cache: QuantizedCache, left: int | None) -> DecodeSteps:
        """The steps after these, in buffers with room for as many as there were, at most `left`."""
        room = max(self.taken, FIRST_ROOM)
        cache.thaw()
        kwargs = {**self.settings, **self.inputs}
        room = room if left is None else max(min(room, left), 1)
        more = DecodeSteps(self.forward, cache, kwargs, room, self.taken)
        # Kernels are warm: the next step is captured at once.
        more._model.is_warm, more._flush.is_warm = True, self._flush.is_warm
        return more

    def run(self, cache: QuantizedCache, kwargs: dict[str, Any]) -> ModelOutput:
        """One step; `generate` may change the result."""
        with self.frozen.step():
            if self.frozen.decoder.starts_with_flush():
                self._run(self._flush, cache)
            for name, kept in self.inputs.items():
                kept.copy_(kwargs[name])
            kind, found = self._run(self._model, cache)
        fields = {name: x.clone() if isinstance(x, Tensor) else x for name, x in found.items()}
        return kind(**fields, past_key_values=cache)

    def _run(self, replayed: Replayed, cache: QuantizedCache) -> Any:
        self._cache = cache
        try:
            return replayed()
        finally:
            del self._cache
            if replayed.error is not None:
                _say(cache, f"a step cannot be captured; {replayed.error}")

    def _forward(self) -> tuple[type[ModelOutput], dict[str, Any]]:
        """The model's step on the kept inputs, without a mask: padding is stored nowhere."""
        self.frozen.decoder.advance()
        given = {**self.settings, **self.inputs, "attention_mask": None}
        out = self.forward(**given, past_key_values=self._cache)
        # The cache belongs to the caller; a result that is kept must not keep it.
        return type(out), {name: x for name, x in out.items() if name != "past_key_values"}


class Replayed:
    """A body that runs as it is once, then is captured and replayed."""

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        self.body, self.device = body, device
        self.is_warm, self.graph, self.error = False, None, None

    def __call__(self) -> Any:
        """The body's result, in tensors that the next call overwrites."""
        if not self.is_warm or self.error is not None:
            result, self.is_warm = self.body(), True
            return result
        if self.graph is None:
            try:
                self.graph = capture(self.body, self.device)
            except RuntimeError as error:  # nothing has run; PyTorch names the operation
                self.error = str(error).partition("\n")[0]
                return self.body()
        self.graph.replay()
        return self.graph.result


def capture(body: Callable[[], Any], device: torch.device) -> CudaGraph:
    """A graph of the launches of `body`."""
    return CudaGraph(body, device)


def _say(cache: QuantizedCache, reason: str) -> None:
    cache.slow.say(
        "decode of `generate`", "runs step by step, 2 to 6 times slower than by CUDA graphs", reason
    )
