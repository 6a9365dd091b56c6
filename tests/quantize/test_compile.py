"""Quantized models under torch.compile: one graph, the same numbers."""

import pytest
import torch
import transformers

from duotone.inference.batch import encode
from tiny_vlm import tiny_example

from mquant_setups import quantized

NEW = 4


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def prompt(loaded):
    return encode(loaded.processor, [tiny_example("heldout", i).messages() for i in (1, 1)])


def decoded(model, step, inputs):
    """Logits of NEW steps of one token behind the prompt, each through `step`."""
    text = model.config.get_text_config(decoder=True)
    cache = transformers.StaticCache(config=text, max_cache_len=64)
    tokens = inputs["input_ids"].shape[1]
    found = [model(**inputs, past_key_values=cache).logits[:, -1:]]
    for past in range(tokens, tokens + NEW):
        ids = found[-1].argmax(-1)
        places = torch.full_like(ids, past)
        found.append(step(input_ids=ids, position_ids=places, past_key_values=cache).logits)
    return torch.cat(found[1:], 1)


def one_graph(model):
    return torch.compile(model, fullgraph=True, backend="eager", dynamic=False)


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ("dynamic-w8a8", "w4a16-g128")]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mquant-w4a8", *SLOW])
def test_a_decode_step_is_one_graph(name):
    loaded, _ = quantized(name, **({"group": 16} if name == "w4a16-g128" else {}))
    model, inputs = loaded.model, prompt(loaded)
    wanted = decoded(model, model, inputs)
    found = decoded(model, one_graph(model), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_prompt_with_pictures_is_one_graph():
    loaded, _ = quantized("mquant-w8a8")
    inputs = prompt(loaded)
    wanted = loaded.model(**inputs, use_cache=False).logits
    found = one_graph(loaded.model)(**inputs, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
