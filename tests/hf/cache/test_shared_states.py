"""Layers that read K and V of an earlier layer: Gemma 4's E2B and Gemma 3n."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import QuantizedCache

from families import inputs, new_model

DENSE = duotone.scheme("dense")
NAMES = ["gemma4_e2b", "gemma3n_text"]


def pairs(name: str) -> list[tuple[PreTrainedModel, Any]]:
    """A model with our cache, and with its own one: another object, since ours serves it, too."""
    ours, own = (new_model(name).double() for _ in range(2))
    text = own.config.get_text_config(decoder=True)
    return [(ours, QuantizedCache(ours, DENSE)), (own, DynamicCache(config=text))]


def read(
    model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None, **more: Any
) -> Tensor:
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, past_key_values=cache, **more)
    return found.logits


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_with_a_past_reads_the_source_as_it_was(name: str) -> None:
    given = inputs(name, [[40], [25]])
    ids, mask = given["input_ids"], given["attention_mask"]
    more = torch.arange(60).view(2, 30) + 20
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    last = torch.cat([whole, whole[:, -1:]], 1)
    answers = []
    for pair in pairs(name):
        read(*pair, ids, mask)
        chunk = read(*pair, more, whole)
        answers.append((chunk, read(*pair, more[:, :1], last)))
    for ours, own in zip(*answers, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_few_queries_alone_see_what_they_saw(name: str) -> None:
    # Without a mask and padding, attention gets none and takes the causal one by itself.
    ids = torch.arange(40).view(2, 20) + 20
    ours, own = (read(*pair, ids, None, logits_to_keep=5) for pair in pairs(name))
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)
