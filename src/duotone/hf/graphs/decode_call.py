"""Decode steps of `generate` as replays of one CUDA graph.

After its prompt a cache holds still: fixed buffers with room for more tokens (`hf.cache.frozen`).
The first step runs as it is and warms up what a capture must find. The second one is captured, with
its inputs in tensors that stay; it and all later ones are replays. Where the room is full, the
cache gets more of it, and the step is captured anew.

Sampling, streaming, stopping and logits processors are `generate`'s own and run between the
replays. What a graph cannot do runs step by step, as without graphs (`rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from duotone.hf.attachment import current_call, running
from duotone.hf.cache.cache import QuantizedCache
from duotone.hf.graphs.decode_steps import DecodeSteps, first_room, say
from duotone.hf.graphs.kept_steps import KeptSteps
from duotone.hf.graphs.rules import (
    is_decode_step,
    other_inputs,
    reason_against_buffers,
    reason_against_capture,
    reason_against_step,
)
from duotone.hf.model.cache_argument import given_cache

# Shorter answers end before a capture has paid for itself.
FEW_TOKENS = 4
# Steps after which a call looks whether the model has changed meanwhile.
LOOK_EVERY = 128


def is_method(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> bool:
    """True where the model's method of that name is this function, set on the instance."""
    return getattr(vars(model).get(name), "__func__", None) is function


def reason_against_replays() -> str | None:
    """Why steps of this thread's `generate` call, which runs, are no replays; None: they are."""
    call = current_call()
    if call is None or call.steps is None:
        return "no step of this call can be captured"
    if call.steps.error is not None or call.steps.is_captured:
        return call.steps.error
    return "no step of this call is captured yet"


class DecodeCall:
    """One call of `generate`, whose decode steps are captured where that is possible.

    forward: the model's own forward pass. ours: the function in its place, which hands a claimed
    step over. new_tokens: the most that the call makes, most_tokens: the most with the prompt; None
    where the call does not say so.
    kept: captures of earlier calls of this model. graphs: False where nothing is captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        ours: Callable[..., Any],
        new_tokens: int | None,
        most_tokens: int | None,
        kept: KeptSteps,
        graphs: bool,
    ) -> None:
        self.model, self.forward, self.ours = model, forward, ours
        self.kept, self.graphs = kept, graphs
        self.new_tokens, self.most_tokens = new_tokens, most_tokens
        self.steps: DecodeSteps | None = None
        # True while the model runs a step that this call has claimed.
        self.claimed = False
        self._has_seen_step = False
        self._is_over = new_tokens is not None and new_tokens < FEW_TOKENS

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this thread's steps of the model may be captured."""
        try:
            with running(self):
                yield
        finally:
            if self.steps is not None:
                self.kept.keep(self.steps)
                self.steps = None

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
        cache = given_cache(kwargs)
        if self.steps.is_full:
            with torch.inference_mode(False), torch.no_grad():
                self.steps = self.steps.with_more_room(cache, self._left)
        return self.steps.run(cache, kwargs)

    def _is_ready(self, kwargs: dict[str, Any]) -> bool:
        """Freeze the cache at its first decode step; see that it is frozen at later ones."""
        cache, before = given_cache(kwargs), 0
        if (reason := reason_against_step(kwargs)) is not None:
            say(cache, reason)
            return self._end()
        is_first, self._has_seen_step = not self._has_seen_step, True
        if others := other_inputs(kwargs):
            # A prompt of one token has inputs that no later step has.
            if is_first:
                return False
            say(cache, f"fixed buffers have no place for {', '.join(others)}")
            return self._end()
        if not is_method(self.model, "forward", self.ours):
            say(cache, "model.forward was replaced inside the block")
            return self._end()
        if self.steps is not None:
            # Something else was asked of the cache meanwhile: beams, tokens that are taken back.
            if not self.steps.holds_still(cache):
                return self._end()
            if changed := self.steps.changed_settings(kwargs):
                say(cache, f"arguments of the forward pass change from step to step: {changed}")
                return self._end()
            before = self.steps.taken
            if before == 1:
                self._check_first_step(cache)
            if before % LOOK_EVERY or not self._has_changed():
                return True
            self.steps = None
        try:
            if (reason := reason_against_buffers(self.model, cache.device)) is not None:
                raise ValueError(reason)
            self._begin(cache, kwargs, before)
        except ValueError as error:
            say(cache, str(error))
            return self._end()
        return True

    def _begin(self, cache: QuantizedCache, kwargs: dict[str, Any], before: int) -> None:
        """Freeze the cache, of which `before` steps of this call have run frozen already."""
        captures = self._captures(cache)
        if captures:
            self.kept.see(self.model)
        with torch.inference_mode(False), torch.no_grad():
            # An earlier call's buffers may have no room left.
            cache.timeline.thaw()
            if self.new_tokens is None and (self.most_tokens or 0) > cache.length:
                self.new_tokens = self.most_tokens - cache.length
            left = None if self.new_tokens is None else self.new_tokens - before
            room = first_room(left, cache.token_bytes)
            steps = DecodeSteps(self.forward, cache, kwargs, room, captures, before)
            self.steps = self.kept.like(steps, cache) if captures else steps

    def _check_first_step(self, cache: QuantizedCache) -> None:
        """Capture no step after one that has changed the model: a replay would not."""
        if self.steps.captures and not self.steps.is_captured and not self.kept.see(self.model):
            say(cache, "a step changes attributes of the model's modules, and a replay would not")
            self.steps.never_capture()

    def _has_changed(self) -> bool:
        """True where a capture of the model would be another one now, or is impossible."""
        if not self.steps.captures:
            return False
        impossible = reason_against_capture(self.model) is not None
        return not self.kept.see(self.model) or impossible

    def _captures(self, cache: QuantizedCache) -> bool:
        """True where steps are to be captured; where a hook forbids it, say so."""
        reason = reason_against_capture(self.model) if self.graphs else None
        if reason is not None:
            say(cache, reason)
        return self.graphs and reason is None

    @property
    def _left(self) -> int | None:
        return None if self.new_tokens is None else self.new_tokens - self.steps.taken

    def _end(self) -> bool:
        self._is_over, self.steps = True, None
        return False
