"""Decode steps of a cache in fixed buffers, as `enable` runs them where it captures nothing."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from duotone import QuantizedCache
from duotone.hf.graphs.decode_steps import DecodeSteps


class HeldStill:
    """Steps of one token per sequence after the prompt, with room for `room` of them."""

    def __init__(self, model: PreTrainedModel, cache: QuantizedCache, room: int) -> None:
        self.model, self.cache, self.room = model, cache, room
        self._steps: DecodeSteps | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor | None = None) -> ModelOutput:
        """The model's output for one more token of every sequence, [batch, 1]."""
        given: dict[str, Any] = {"input_ids": input_ids, "use_cache": True}
        if position_ids is not None:
            given["position_ids"] = position_ids
        if self._steps is None:
            steps = (self.model.forward, self.cache, given, self.room)
            self._steps = DecodeSteps(*steps, captures=False)
        return self._steps.run(self.cache, given)


def decode(model: PreTrainedModel, cache: QuantizedCache, ids: Tensor, room: int = 0) -> Tensor:
    """Logits after each of `ids` [batch, n], in fixed buffers with `room`; 0: in growing ones."""
    if room:
        step = HeldStill(model, cache, room)
        return torch.cat([step(x).logits for x in ids.split(1, 1)], 1)
    with torch.no_grad():
        rows = [model(input_ids=x, past_key_values=cache).logits for x in ids.split(1, 1)]
    return torch.cat(rows, 1)
