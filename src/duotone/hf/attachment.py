"""The tie between a model instance and duotone: attention implementation and input hook.

Attached while an `enable` block or a `QuantizedCache` lives, then undone. While attached, calls
without a quantized cache run through sdpa as before. Nothing of a step is kept here: threads may
run one model with a cache each. A call that runs in a thread may claim steps, which then are its
own.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duotone.hf.model.cache_argument import given_cache
from duotone.hf.model.copies import Clean, copied_as_it_is, copied_clean, drop_hooks, not_pickled
from duotone.hf.model.text_attention import (
    NAME,
    NOT_COMPILED,
    set_text_implementation,
    text_implementation,
)

_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()
# Reentrant: collecting a cache releases its hold, and that can happen anywhere.
_LOCK = threading.RLock()
_LOCAL = threading.local()


def current_call() -> Any:
    """The call of a model that runs in this thread, or None."""
    return getattr(_LOCAL, "call", None)


@contextmanager
def running(call: Any) -> Iterator[None]:
    """Inside, a call may claim this thread's steps, which it then runs by itself.

    call: has `claims(model, args, kwargs)`, and `claimed`, True while a claimed step runs.
    """
    before, _LOCAL.call = current_call(), call
    try:
        yield
    finally:
        _LOCAL.call = before


class Attachment:
    """Counted: the first `acquire` ties the model, the last `release` restores it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._holders = 0
        # What else takes something of ours off a deep copy of the model.
        self.cleaners: list[Clean] = []

    @classmethod
    def to(cls, model: PreTrainedModel) -> Attachment:
        """The model's attachment; counts one more holder."""
        with _LOCK:
            attachment = _ATTACHED.get(model)
            if attachment is None:
                attachment = _ATTACHED[model] = cls(model)
            return attachment.acquire()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        # A copy of the model takes its hooks along, which are then dropped.
        return self

    def __reduce__(self) -> Any:
        raise not_pickled()

    def acquire(self) -> Attachment:
        """Count one more holder."""
        with _LOCK:
            if self._holders == 0:
                self._attach(self._model())
            self._holders += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one restores the model."""
        with _LOCK:
            self._holders -= 1
            model = self._model()
            if self._holders == 0 and model is not None:
                copied_as_it_is(model, self._clean)
                for part in self._parts:
                    copied_as_it_is(part, self._clean_part)
                self._parts = ()
                for hook in self._hooks:
                    hook.remove()
                set_text_implementation(model, self._previous)

    def _attach(self, model: PreTrainedModel) -> None:
        self._parameters = inspect.signature(model.forward)
        self._previous = text_implementation(model)
        set_text_implementation(model, NAME)
        self._hooks = (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            # Also after a forward pass that raised.
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        )
        copied_clean(model, self._clean)
        text = model.config.get_text_config(decoder=True)
        parts = (part for part in model.modules() if part is not model)
        self._parts = tuple(part for part in parts if vars(part).get("config") is text)
        for part in self._parts:
            copied_clean(part, self._clean_part)

    def _clean(self, clone: PreTrainedModel, memo: dict[int, Any]) -> None:
        """Make a deep copy what the model was before anything of ours was on it."""
        drop_hooks(clone, [hook.id for hook in self._hooks])
        set_text_implementation(clone, self._previous)
        for clean in self.cleaners:
            clean(clone, memo)

    def _clean_part(self, clone: nn.Module, memo: dict[int, Any]) -> None:
        """Give the configuration of a copied part of the model its attention back."""
        clone.config._attn_implementation = self._previous

    def _inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Inputs of the model by name, if one of our caches is among them."""
        if model is not self._model():
            return {}
        given = self._parameters.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        return given if hasattr(given_cache(given), "begin_step") else {}

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not _is_compiled_without_us(args, kwargs):
            self._begin(model, args, kwargs)

    def _after_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if not _is_compiled_without_us(args, kwargs):
            # A forward pass that raised has no output.
            self._end(model, args, kwargs, output is not None)

    @torch.compiler.disable(reason=NOT_COMPILED)
    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = current_call()
        if call is not None and call.claims(model, args, kwargs):
            return
        if given := self._inputs(model, args, kwargs):
            given_cache(given).begin_step(given)

    @torch.compiler.disable(reason=NOT_COMPILED)
    def _end(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_whole: bool
    ) -> None:
        call = current_call()
        if call is not None and call.claimed:
            call.claimed = False
            return
        if given := self._inputs(model, args, kwargs):
            given_cache(given).end_step(is_whole)


def _is_compiled_without_us(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True where torch.compile traces a step of another cache, whose graph must not break."""
    if not torch.compiler.is_compiling():
        return False
    return not any(hasattr(given, "begin_step") for given in (*args, *kwargs.values()))
