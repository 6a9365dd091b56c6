"""A model's attention, heard on its way: queries, K and V of every layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from duotone.hf.model.text_attention import set_text_implementation, text_implementation

NAME = "duotone-calibrate"
Heads = Float[Tensor, "batch heads tokens head_dim"]
Record = Callable[[nn.Module, Heads, Heads, Heads, float | None], None]
Attended = Callable[[nn.Module, Float[Tensor, "batch tokens heads head_dim"]], None]


@contextmanager
def recording(model: Any, record: Record, attended: Attended | None = None) -> Iterator[None]:
    """Pass the language model's attention through `record`, and on to what it was before.

    record: receives one layer of one step: (module, queries, K, V, scale). attended: receives
    (module, its attention's output) afterwards.
    Vision towers keep their own attention and are not seen. Undone at the end, come what may.
    """
    before = text_implementation(model)

    def attention(module, query, key, value, attention_mask, *args, scaling=None, **kwargs):
        record(module, query, key, value, scaling)
        run = _original(module, before)
        made = run(module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs)
        if attended is not None:
            attended(module, made[0])
        return made

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    try:
        set_text_implementation(model, NAME)
        yield
    finally:
        set_text_implementation(model, before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME)


def _original(module: nn.Module, name: str) -> Callable[..., Any]:
    """The implementation of that name; "eager" is a function of the model's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
