"""Calibrated text beside calibrated pictures in one cache: each half is what it is alone."""

from pathlib import Path

import pytest
import torch
from saved_caches import next_logits
from test_generate import assert_same_run, batch_of, run
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.cache import LayerStore
from duotone.calibrate import Settings
from duotone.calibrate.random_bases import random_bases_with_text
from duotone.quant import LayerRule

from families import IMAGE, inputs, new_model, tiny_model

SETTINGS = Settings(group=4, recent=3)
PROMPT = [[3, "image", 50, "image", 29]]


def joined_spec(model: PreTrainedModel, folder: Path) -> CacheSpec:
    """Spec of both with random bases, in which one layer's text has wider codes than others."""
    spec = random_bases_with_text(model, folder, SETTINGS)
    text = spec.at_layer(1).text
    wider = text.replace(key=text.key.replace(classes=((4, 1.0),)))
    return spec.replace(layers=(*spec.layers, LayerRule(1, 2, text=wider)))


def pictures_alone(spec: CacheSpec) -> CacheSpec:
    rules = tuple(rule.replace(text=None) for rule in spec.layers)
    return spec.replace(text="dense", layers=rules)


def text_alone(spec: CacheSpec) -> CacheSpec:
    rules = tuple(rule.replace(visual=None, background=None) for rule in spec.layers)
    return spec.replace(visual="dense", background=None, layers=rules)


def read(model: PreTrainedModel, spec: CacheSpec, given: dict[str, Tensor]) -> QuantizedCache:
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache


def read_on(model: PreTrainedModel, cache: QuantizedCache, ids: Tensor) -> None:
    """Give the cache further tokens one by one."""
    for token in ids.split(1, dim=1):
        mask = torch.ones(len(ids), cache.length + 1, dtype=torch.long)
        with torch.no_grad():
            model(input_ids=token, attention_mask=mask, past_key_values=cache)


def packed(store: LayerStore, part: str) -> list[Tensor]:
    """K and V of one part as they come back."""
    pair = getattr(store, part)
    return [x.dequantize() for x in (pair.key, pair.value)]


def test_each_half_is_packed_as_alone(tmp_path: Path) -> None:
    """In one step all layers see the prompt in full precision, whatever is packed afterwards."""
    model, given = tiny_model("internvl"), inputs("internvl", PROMPT)
    spec = joined_spec(model, tmp_path)
    both = read(model, spec, given)
    pictures, text = (read(model, s(spec), given) for s in (pictures_alone, text_alone))
    for ours, spans, stream in zip(both.layers, pictures.layers, text.layers, strict=True):
        for part, alone in (("visual", spans), ("background", spans), ("stream", stream)):
            for x, y in zip(packed(ours.store, part), packed(alone.store, part), strict=True):
                assert torch.equal(x, y)
                assert x.abs().sum() > 0
        assert spans.store.stream is None
        assert stream.store.visual is None
    widths = [layer.store.stream.key.spec.classes for layer in both.layers]
    assert widths[1] == ((4, 1.0),) != widths[0]


def test_text_is_packed_token_by_token_as_in_one_step(tmp_path: Path) -> None:
    """In the first layer, whose K and V depend on no cache; doubles, since codes have ties."""
    model = new_model("internvl").double()
    given = {n: x.double() if x.is_floating_point() else x
             for n, x in inputs("internvl", PROMPT).items()}  # fmt: skip
    spec = joined_spec(model, tmp_path)
    whole = read(model, spec, given)
    cut = given["input_ids"].shape[1] - 22
    start = {n: x[:, :cut] if n in ("input_ids", "attention_mask") else x for n, x in given.items()}
    later = read(model, spec, start)
    before = int(later.ledger.state.stream.lengths)
    read_on(model, later, given["input_ids"][:, cut:])
    assert int(later.ledger.state.stream.lengths) == before + 20
    ours, theirs = later.memory(), whole.memory()
    assert (ours.codes_bytes, ours.params_bytes) == (theirs.codes_bytes, theirs.params_bytes)
    for part in ("visual", "background", "stream"):
        pairs = (packed(cache.layers[0].store, part) for cache in (later, whole))
        for x, y in zip(*pairs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_memory_is_what_was_planned_and_files_come_back(tmp_path: Path) -> None:
    model, given = tiny_model("internvl"), inputs("internvl", PROMPT)
    spec = joined_spec(model, tmp_path)
    cache = read(model, spec, given)
    read_on(model, cache, torch.arange(5, 27)[None])
    text = int((given["input_ids"] != IMAGE).sum())
    of = {"visual_tokens": 8, "images": 2, "text_tokens": text, "new_tokens": 22}
    planned = duotone.plan(model, spec, **of)
    memory = cache.memory()
    assert memory.codes_bytes == planned.codes_bytes
    assert memory.params_bytes == planned.params_bytes
    cache.save(tmp_path / "cache.safetensors")
    again = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    assert torch.equal(next_logits(model, again), next_logits(model, cache))


def unrounded(spec: CacheSpec) -> CacheSpec:
    """Spec with nothing of its quantizers but their bases and groups."""

    def plain(policy: KVSpec | None) -> KVSpec | None:
        if policy is None:
            return None
        pair = ((t.transform, t.group) for t in (policy.key, policy.value))
        return KVSpec(*(TensorSpec(8, transform=basis, group=group) for basis, group in pair))

    names = ("visual", "background", "text")
    rules = [r.replace(**{n: plain(getattr(r, n)) for n in names}) for r in spec.layers]
    return spec.replace(**{n: plain(getattr(spec, n)) for n in names}, layers=tuple(rules))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", ["internvl", "qwen2_vl", "llava"])
def test_without_rounding_a_conversation_is_that_of_16_bit(name: str, tmp_path: Path) -> None:
    model, given = tiny_model(name), batch_of(name)
    spec = unrounded(joined_spec(model, tmp_path))
    longer = {"max_new_tokens": 24}
    assert_same_run(run(model, given, spec, **longer), run(model, given, **longer))


def test_answers_are_those_of_the_reference(tmp_path: Path) -> None:
    model, given = tiny_model("internvl"), batch_of("internvl")
    spec = joined_spec(model, tmp_path)
    found = []
    for impl in ("auto", "reference"):
        cache = QuantizedCache(model, spec, impl=impl)
        found.append(model.generate(**given, past_key_values=cache, max_new_tokens=24))
        assert int(cache.ledger.state.stream.lengths.min()) > 8
    assert torch.equal(*found)
