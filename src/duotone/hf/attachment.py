"""The tie between a model instance and duotone: attention implementation and input hook.

Attached while an `enable` block or a `QuantizedCache` lives, then undone. While attached, calls
without a quantized cache run through sdpa as before.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duotone.hf.attention import NAME, register

_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()


class Attachment:
    """Counted: the last `release` restores the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        register()
        self._model = weakref.ref(model)
        self._holders = 0
        self._parameters = inspect.signature(model.forward)
        self._previous = text_implementation(model)
        set_text_implementation(model, NAME)
        self._hooks = (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            # Also after a forward pass that raised.
            model.register_forward_hook(self._after_forward, always_call=True),
        )
        self._end_step: Callable[[], None] | None = None

    @classmethod
    def to(cls, model: PreTrainedModel) -> Attachment:
        """The model's attachment, made on first use; counts one more holder."""
        attachment = _ATTACHED.get(model)
        if attachment is None:
            attachment = _ATTACHED[model] = cls(model)
        return attachment.acquire()

    def acquire(self) -> Attachment:
        """Count one more holder."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one restores the model."""
        self._holders -= 1
        model = self._model()
        if self._holders == 0 and model is not None:
            _ATTACHED.pop(model, None)
            for hook in self._hooks:
                hook.remove()
            set_text_implementation(model, self._previous)

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return  # a static cache, whose decode steps need no announcement
        given = self._parameters.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        cache = given.get("past_key_values")
        if hasattr(cache, "begin_step"):
            self._end_step = cache.end_step
            cache.begin_step(
                given.get("input_ids"), given.get("inputs_embeds"), given.get("attention_mask")
            )

    def _after_forward(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        end_step, self._end_step = self._end_step, None
        if end_step is not None:
            end_step()


def text_implementation(model: PreTrainedModel) -> str:
    """The name of the language model's attention implementation."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def set_text_implementation(model: PreTrainedModel, name: str) -> None:
    """Change the language model's attention only; vision towers keep theirs."""
    text = model.config.get_text_config(decoder=True)
    names = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({names[0]: name} if names else name)
    if text._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not let its attention implementation be set: it does "
            "not go through transformers' AttentionInterface. Use the model's own cache."
        )
