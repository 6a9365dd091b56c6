"""8-bit windows of models whose keys are large: nothing is cut off, in no cache."""

import pytest
import torch
from held_still import decode
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, QuantizedCache
from duotone.cache.dense_dtype import LARGEST, kept_as, read_as

from families import inputs, new_model

BIAS, PROMPT, NEW = 900.0, 12, 5
WINDOW = {"sink": 4, "recent": 64, "dense_dtype": "float8_e4m3fn"}
SPECS = {
    "fp8": duotone.scheme("fp8"),
    "a stream's window": duotone.scheme("kivi", bits=2).replace(**WINDOW),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Qwen2 with a key bias as Qwen2.5 has in its first and last layer."""
    made = new_model("qwen2")
    with torch.no_grad():
        for layer in (made.model.layers[0], made.model.layers[-1]):
            layer.self_attn.k_proj.bias[7] = BIAS
            layer.self_attn.v_proj.bias[3] = BIAS
    return made


@torch.no_grad()
def read(model: PreTrainedModel, cache: object) -> None:
    ids = inputs("qwen2", [[PROMPT + NEW]])["input_ids"]
    model(input_ids=ids[:, :PROMPT], past_key_values=cache)
    for step in ids[:, PROMPT:].split(1, 1):
        model(input_ids=step, past_key_values=cache)


def first_layer(model: PreTrainedModel, spec: CacheSpec, kind: str) -> tuple[Tensor, Tensor]:
    """K and V of the first layer, whose input no cache changes."""
    cache = QuantizedCache(model, spec)
    if kind == "grows":
        read(model, cache)
        segments = cache.layers[0].segments()
    else:
        ids = inputs("qwen2", [[PROMPT + NEW]])["input_ids"]
        with torch.no_grad():
            model(input_ids=ids[:, :PROMPT], past_key_values=cache)
        decode(model, cache, ids[:, PROMPT:], room=NEW)
        segments = cache.frozen.decoder.stores[0].segments
    dense = segments[-1]
    return tuple(dense.states(name)[:, :, : PROMPT + NEW] for name in ("key", "value"))


@pytest.mark.parametrize("kind", ["grows", "frozen"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_no_key_and_no_value_is_cut_off(model: PreTrainedModel, spec: CacheSpec, kind: str) -> None:
    exact = DynamicCache(config=model.config)
    read(model, exact)
    kept = first_layer(model, spec, kind)
    for x, eight in zip((exact.layers[0].keys, exact.layers[0].values), kept, strict=True):
        assert x.abs().max() > 1.5 * LARGEST
        top = x.abs().amax(-1, keepdim=True)
        assert ((eight - x).abs() <= torch.maximum(x.abs() / 16, top * 2.0**-17) * 1.0001).all()
        assert not torch.equal(eight, x)


def test_the_bytes_are_those_of_the_plan(model: PreTrainedModel) -> None:
    """A byte per number and one per token, head, K and V."""
    cache = QuantizedCache(model, SPECS["fp8"])
    read(model, cache)
    facts, store = cache.facts, cache.layers[0].store
    rows = 2 * facts.layers * facts.kv_heads * store.key.shape[2]
    assert cache.memory().dense_bytes == rows * (facts.head_dim + 1)
    planned = duotone.plan(model, SPECS["fp8"], text_tokens=PROMPT, new_tokens=NEW)
    spare = store.key.shape[2] - PROMPT - NEW
    assert planned.dense_bytes == rows * (facts.head_dim + 1) * (PROMPT + NEW) // (
        PROMPT + NEW + spare
    )


def test_scales_are_saved_with_the_numbers(model: PreTrainedModel, tmp_path) -> None:
    cache = QuantizedCache(model, SPECS["a stream's window"])
    read(model, cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        for name in ("key", "value"):
            assert torch.equal(getattr(ours.store, name), getattr(theirs.store, name))
    assert loaded.memory().dense_bytes == cache.memory().dense_bytes


def test_a_stream_packs_what_its_window_had(model: PreTrainedModel) -> None:
    """Tokens that leave an 8-bit window are packed from there, large keys among them."""
    spec = SPECS["a stream's window"].replace(sink=0, recent=0)
    kept, plain = (spec.replace(dense_dtype=name) for name in ("float8_e4m3fn", "model"))
    x = torch.randn(1, 2, 32, 16) * 300
    seen = []
    for own, given in ((kept, x), (plain, read_as(kept_as(x, torch.uint8), x.dtype))):
        cache = QuantizedCache(model, own)
        store, ledger = cache.new_store(0), duotone.cache.Ledger(own, 1, x.device)
        visual = torch.zeros(1, 32, dtype=torch.bool)
        store.apply(ledger.plan(visual, ~visual), given, given)
        seen.append(store.stream.key.dequantize())
        cache.detach()
    assert torch.equal(*seen)
    assert seen[0].abs().max() > LARGEST
