"""Caches of short prompts, of which nothing or little is quantized, against the model's own cache.

Every preset on every family holds no more bytes of tokens, states and windows than the model's own
cache in 16 bit. Beside them is the index of all layers together: 5 bytes per token (and per ledger:
evicting schemes have one per layer), and a few lengths and tables.
"""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import QuantizedCache
from duotone.hf.verdict import refusal
from duotone.quant.schemes import SCHEMES
from held import reachable

from families import FAMILIES, HYBRIDS, inputs, new_model, typed

ALL = {**FAMILIES, **HYBRIDS}
NAMES = [pytest.param(n, marks=() if n == "llama" else pytest.mark.slow) for n in ALL]
LENGTHS, WITH_PICTURES = (1, 17, 125, 133, 140, 300), (17, 133)
PER_TOKEN, LEDGER = 5, 128


def specs_for(model: PreTrainedModel) -> dict[str, duotone.CacheSpec]:
    """Presets by name, but for those that refuse the model."""
    found = {name: duotone.scheme(name) for name in SCHEMES}
    return {n: spec for n, spec in found.items() if refusal(QuantizedCache, model, spec) is None}


def prompts(name: str) -> list[dict[str, Tensor]]:
    """A row of text of each length, and one with a picture where the family has them."""
    rows = [[[n]] for n in LENGTHS]
    if ALL[name].is_multimodal:
        rows += [[[n // 2, "image", n - n // 2]] for n in WITH_PICTURES]
    return [inputs(name, row) for row in rows]


def own_bytes(cache: DynamicCache) -> int:
    """Bytes of the cache's tensors; transformers keeps the width of windows in one, too."""
    return sum(x.nbytes for x in reachable(cache).values() if x.dim())


# Llama 4's towers keep rotations as complex numbers, which count no bytes here.
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_no_preset_holds_more_than_the_models_own_cache(name: str) -> None:
    model = new_model(name).to(torch.bfloat16)
    specs = specs_for(model)
    assert len(specs) >= 8
    for given in prompts(name):
        own = DynamicCache(config=model.config.get_text_config(decoder=True))
        with torch.no_grad():
            model(**typed(model, given), past_key_values=own)
        for scheme, spec in specs.items():
            cache = QuantizedCache(model, spec)
            with torch.no_grad():
                model(**typed(model, given), past_key_values=cache)
            report, timeline = cache.memory(), cache.timeline
            ledgers = len({id(ledger) for ledger in timeline.ledgers})
            assert report.index_bytes <= ledgers * (PER_TOKEN * cache.length + LEDGER), scheme
            norms = sum(store.norm_bytes for store in timeline.stores)
            held = report.total_bytes - report.index_bytes - norms
            assert held <= own_bytes(own), f"{scheme}, {cache.length} tokens"


@pytest.mark.parametrize("tokens", [1, 17, 133, 300])
def test_spare_slots_are_few_beside_the_tokens(tokens: int) -> None:
    model = new_model("llama")
    with duotone.enable(model, duotone.scheme("kivi", bits=2)) as session:
        model.generate(**inputs("llama", [[tokens]]), max_new_tokens=24, do_sample=False)

    cache = session.cache
    spare = cache.timeline.stores[0].key.shape[2] - int(cache.ledger.state.dense.lengths)
    assert 0 <= spare <= cache.length / 16
