"""Caches under `torch.autocast`: states come in several types, codes are those without it."""

import math
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from held_still import decode
from small_specs import NAMES, small
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, QuantizedCache
from duotone.attention import decode_attention
from duotone.cache import LayerStore, Ledger

from families import inputs, new_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A group leaves the windows with the prompt, another one at a decode step. The vision tower itself
# fails under some autocasts: here the model is given embeddings, of which some count as visual.
LENGTHS, VISUAL, STEPS = [[60], [56]], slice(6, 10), 33


def model_in(dtype: torch.dtype) -> PreTrainedModel:
    return new_model("internvl").to(dtype)


def cache_of(model: PreTrainedModel, spec: CacheSpec) -> QuantizedCache:
    mask = torch.zeros(len(LENGTHS), max(LENGTHS)[0], dtype=torch.bool)
    mask[:, VISUAL] = True
    return QuantizedCache(model, spec, visual_mask=mask)


def autocast(dtype: torch.dtype | None, device: str = "cpu"):
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def logits(
    model: PreTrainedModel, cache, prompt: torch.dtype | None, later: torch.dtype | None
) -> Tensor:
    """Logits of all steps; prompt, later: the types of autocast then, None: without."""
    device = model.device.type
    given = {name: x.to(device) for name, x in inputs("internvl", LENGTHS).items()}
    given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    mask, steps = given["attention_mask"], torch.randint(2, 280, (len(LENGTHS), STEPS)).to(device)
    with torch.no_grad(), autocast(prompt, device):
        outputs = [model(**given, past_key_values=cache).logits[:, -1]]
    for token in steps.split(1, 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        with torch.no_grad(), autocast(later, device):
            out = model(input_ids=token, attention_mask=mask, past_key_values=cache)
        outputs.append(out.logits[:, -1])
    return torch.stack(outputs, 1).float()


def flushes(cache: QuantizedCache) -> bool:
    """Two groups have left the windows of the longest sequence."""
    return int(cache.ledger.state.stream.lengths.max()) >= 64


CASES = [("kivi", BF16, FP16), ("duotone-mixed", FP16, BF16)]
CASES += [
    pytest.param(name, FP32, BF16, marks=[pytest.mark.slow] * (i % 4 > 0))
    for i, name in enumerate(NAMES)
]
CASES += [
    pytest.param(name, model, cast, marks=pytest.mark.slow)
    for name in NAMES
    for model in (FP32, BF16, FP16)
    for cast in (BF16, FP16)
    if (model, cast) != (FP32, BF16)
]


@pytest.mark.parametrize(("name", "dtype", "cast"), CASES)
def test_every_scheme_runs(name: str, dtype: torch.dtype, cast: torch.dtype) -> None:
    model, spec = model_in(dtype), small(name)
    cache = cache_of(model, spec)
    assert logits(model, cache, cast, cast).isfinite().all()
    assert spec.text == "dense" or flushes(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("cast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_runs_on_a_gpu(name: str, cast: torch.dtype) -> None:
    for dtype in (FP32, BF16):
        model = model_in(dtype).cuda()
        found = logits(model, cache_of(model, small(name)), cast, cast)
        assert found.isfinite().all()


@pytest.mark.parametrize("types", [(None, BF16), (BF16, None), (FP16, BF16)], ids=str)
def test_autocast_may_begin_and_end_between_steps(types: tuple) -> None:
    for dtype in (FP32, BF16):
        model, spec = model_in(dtype), small("duotone-mixed")
        cache = cache_of(model, spec)
        assert logits(model, cache, *types).isfinite().all()
        assert len({layer.store.dtype for layer in cache.layers}) == 1


def test_a_cache_that_an_autocast_filled_holds_still_without_it() -> None:
    for dtype in (FP32, BF16):
        model, given = model_in(dtype), inputs("internvl", LENGTHS)
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
        cache = cache_of(model, small("duotone-mixed"))
        with torch.no_grad(), autocast(FP16):
            model(**given, past_key_values=cache)
        kept, steps = cache.layers[0].store.dtype, torch.randint(2, 280, (len(LENGTHS), STEPS))
        assert decode(model, cache, steps, room=STEPS).isfinite().all()
        assert {store.dtype for store in cache.timeline.frozen.decoder.stores} == {kept}


def test_16_bit_tokens_are_as_near_as_those_of_the_models_own_cache() -> None:
    model, spec = model_in(FP32), duotone.scheme("dense")
    ours, theirs, exact = (
        logits(model, cache, cast, cast)
        for cache, cast in (
            (cache_of(model, spec), BF16),
            (DynamicCache(), BF16),
            (DynamicCache(), None),
        )
    )
    errors = [float((x - exact).square().mean().sqrt()) for x in (ours, theirs)]
    assert 0 < errors[0] < 2 * errors[1]
    assert errors[1] < 0.2 * float(exact.std())


def test_generation_and_operations_on_the_cache(tmp_path) -> None:
    """Two flushes of `generate`, beams, a crop, the disk; as issue reports have it: with KIVI."""
    model, given = model_in(FP32), inputs("internvl", LENGTHS)
    with torch.autocast("cpu", dtype=BF16):
        with duotone.enable(model, small("kivi")) as session:
            model.generate(**given, max_new_tokens=STEPS, num_beams=2, do_sample=False)
        cache = session.cache
        cache.crop(-5)
        cache.save(tmp_path / "cache.safetensors")
        loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.memory() == cache.memory()


def stored(spec: CacheSpec, cast: torch.dtype | None) -> tuple[list[Tensor], Tensor]:
    """All tensors of a store, and attention to it, after the same states."""
    torch.manual_seed(0)
    ledger, store = Ledger(spec, 2, torch.device("cpu")), LayerStore(spec)
    visual = (torch.arange(60) < 20).expand(2, -1)
    for step in range(STEPS + 1):
        shown = visual if step == 0 else torch.zeros(2, 1, dtype=torch.bool)
        # In the types in which a model under autocast gives them.
        key = torch.randn(2, 2, shown.shape[1], 32)
        value = torch.randn(2, 2, shown.shape[1], 32).to(BF16)
        with autocast(cast):
            store.apply(ledger.plan(shown, torch.ones_like(shown)), key, value)
    query = torch.randn(2, 4, 1, 32)
    with autocast(cast):
        output = decode_attention(query, store.segments(ledger.state), sm_scale=0.2, tau=spec.tau)
    return parts(store), output


def parts(store: LayerStore) -> list[Tensor]:
    found = [store.key.float(), store.value.float()]
    found += [] if store.key_norm is None else [store.key_norm]
    for pair in (store.visual, store.background, store.stream):
        for tensor in () if pair is None else (pair.key, pair.value):
            named = ((f.name, getattr(tensor, f.name)) for f in fields(tensor))
            found += [x for name, x in named if isinstance(x, Tensor)]
    return found


@pytest.mark.parametrize("name", [n for n in NAMES if duotone.scheme(n).evict is None])
def test_codes_and_attention_are_those_without_autocast(name: str) -> None:
    ours, theirs = (stored(small(name), cast) for cast in (BF16, None))
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(ours[1], theirs[1])


def test_later_states_are_kept_in_the_first_ones_type() -> None:
    spec = duotone.scheme("dense")
    for first, second, kept in (
        ((FP32, BF16), (BF16, BF16), FP32),
        ((BF16, BF16), (FP32, BF16), BF16),
        ((FP16, BF16), (FP16, BF16), FP32),
    ):
        ledger, store = Ledger(spec, 1, torch.device("cpu")), LayerStore(spec)
        for types in (first, second):
            one = torch.ones(1, 3, dtype=torch.bool)
            states = (torch.full((1, 2, 3, 8), math.pi).to(dtype) for dtype in types)
            store.apply(ledger.plan(~one, one), *states)
        assert store.dtype == store.key.dtype == store.value.dtype == kept
        assert store.key.shape[2] == 6
