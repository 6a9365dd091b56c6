"""Layers that read other layers' codes, and layers with policies of their own."""

import pytest
import torch

import duotone
from duotone import CacheSpec, KVSpec, LayerRule, QuantizedCache, Sharing, TensorSpec
from duotone.attention.reference import attend
from duotone.cache import DenseSegment

from families import inputs, tiny_model

STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, "channels", 8))
PROMPTS = [[3, "image", 9, 8, 7, 6, 5], [4, 11, 12, "image", 13]]
SHARES = {
    "pairs": Sharing(key=0, value=0),
    "pairs-from-1": Sharing(key=1, value=1),
    "three-last-dominant": Sharing(key=0, value=0, layers=3, dominant=2),
    "keys-only": Sharing(key=1, dominant=1),
}


def spec_of(share: Sharing, visual: KVSpec | str = "text") -> CacheSpec:
    return CacheSpec(visual=visual, text=STREAM, sink=2, recent=3, share=share)


def run(spec: CacheSpec, steps: int = 14) -> QuantizedCache:
    model = tiny_model("internvl")
    cache = QuantizedCache(model, spec)
    model.generate(
        **inputs("internvl", PROMPTS), past_key_values=cache, max_new_tokens=steps, do_sample=False
    )
    return cache


def completed(cache: QuantizedCache, store: str, which: str) -> list:
    return [getattr(layer.store._complete(store), which) for layer in cache.layers]


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("visual", ["text", STREAM], ids=["stream", "spans"])
def test_a_layer_reads_its_sources_codes_with_its_own_scales(share, visual) -> None:
    spec = spec_of(share, visual)
    cache, alone = run(spec), run(spec.replace(share=None))
    for name in ("stream",) if visual == "text" else ("stream", "visual"):
        for which in ("key", "value"):
            full = completed(cache, name, which)
            for index, tensor in enumerate(full):
                source = spec.source(which, index, len(full))
                own = getattr(getattr(cache.layers[index].store, name), which)
                assert tensor.codes.data_ptr() == full[source].codes.data_ptr()
                assert (own.codes is None) == (source != index)
            # The first layer sees the same states with and without sharing.
            mine = getattr(getattr(cache.layers[0].store, name), which)
            theirs = getattr(getattr(alone.layers[0].store, name), which)
            keep = int(theirs.blocks.lengths.min())
            prompt = slice(None, min(keep, 4))
            assert torch.equal(mine.scale[:, :, prompt][:, :, :1], theirs.scale[:, :, :1])


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_attention_over_shared_codes_is_attention_over_what_they_decode_to(share) -> None:
    cache = run(spec_of(share))
    for layer in cache.layers:
        for segment in layer.store.segments(cache.ledger.state):
            query = torch.randn(2, 4, 1, 16)
            states = (segment.key, segment.value)
            decoded = (x if isinstance(x, torch.Tensor) else x.dequantize() for x in states)
            dense = DenseSegment(*decoded, segment.lengths)
            ours, theirs = (attend(query, [s], sm_scale=0.25) for s in (segment, dense))
            assert torch.allclose(ours, theirs, atol=1e-4)


def test_only_the_stored_codes_are_counted() -> None:
    shared, alone = (run(spec_of(s)).memory() for s in (Sharing(key=0, value=0), None))
    # Three layers: the pair 0, 1 stores once, layer 2 for itself.
    assert shared.codes_bytes * 3 == alone.codes_bytes * 2
    assert shared.params_bytes == alone.params_bytes
    assert shared.nominal_bits == pytest.approx(2 * 2 / 3)


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_shared_caches_crop_reorder_save_and_load(share, tmp_path) -> None:
    model, spec = tiny_model("internvl"), spec_of(share)
    cache = run(spec)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-3)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    for which in ("key", "value"):
        both = (completed(c, "stream", which) for c in (cache, loaded))
        for ours, theirs in zip(*both, strict=True):
            assert torch.equal(ours.dequantize(), theirs.dequantize())
    assert loaded.memory() == cache.memory()


def test_layers_keep_their_own_formats(tmp_path) -> None:
    wide = KVSpec(TensorSpec(8, group=8), TensorSpec(4, "channels", 16))
    spec = CacheSpec(visual="text", text=STREAM, recent=3, layers=(LayerRule(1, 2, text=wide),))
    cache = run(spec)
    assert [layer.store.stream.key.spec.bits for layer in cache.layers] == [2, 8, 2]
    assert [layer.store.stream.value.spec.group for layer in cache.layers] == [8, 16, 8]
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", tiny_model("internvl"))
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert torch.equal(ours.store.stream.key.dequantize(), theirs.store.stream.key.dequantize())


def test_a_plan_counts_what_the_cache_holds() -> None:
    spec = spec_of(Sharing(key=0, value=1), STREAM)
    model = tiny_model("internvl")
    cache = QuantizedCache(model, spec)
    given = inputs("internvl", [[3, "image", 9, 8, 7, 6, 5, 4, 3, 2, 1, 10]])
    model.generate(**given, past_key_values=cache, max_new_tokens=9, do_sample=False)
    tokens = given["input_ids"].shape[1]
    planned = duotone.plan(model, spec, visual_tokens=4, text_tokens=tokens - 4, new_tokens=8)
    held = cache.memory()
    assert planned.codes_bytes == held.codes_bytes
    assert planned.params_bytes == held.params_bytes


def test_a_spec_for_a_deeper_model_raises_before_any_work() -> None:
    with pytest.raises(ValueError, match="within 3 layers"):
        QuantizedCache(tiny_model("internvl"), duotone.scheme("asymkv", lk=4))
