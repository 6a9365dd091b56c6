"""Layers that read other layers' codes, and layers with policies of their own."""

import functools

import pytest
import torch
from transformers import DynamicCache

from duotone import CacheSpec, KVSpec, QuantizedCache, Sharing, TensorSpec
from duotone.attention import attend_chunk, decode_attention
from duotone.cache import PackedSegment
from duotone.quant import average_codes

from families import inputs, tiny_model

STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, "channels", 8))
PROMPTS = [[3, "image", 9, 8, 7, 6, 5], [4, 11, 12, "image", 13]]
SHARES = {
    "pairs": Sharing(key=0, value=0),
    "pairs-from-1": Sharing(key=1, value=1),
    "three-last-dominant": Sharing(key=0, value=0, layers=3, dominant=2),
    "keys-only": Sharing(key=1, dominant=1),
    "average": Sharing(key=0, value=1, weights=(0.6, 0.4)),
    "average-of-three": Sharing(key=0, value=0, layers=3, dominant=1, weights=(0.2, 0.5, 0.3)),
}


def spec_of(share: Sharing | None, visual: KVSpec | str = "text") -> CacheSpec:
    return CacheSpec(visual=visual, text=STREAM, sink=2, recent=3, share=share)


def run(spec: CacheSpec, steps: int = 14) -> QuantizedCache:
    model = tiny_model("internvl")
    cache = QuantizedCache(model, spec)
    model.generate(
        **inputs("internvl", PROMPTS), past_key_values=cache, max_new_tokens=steps, do_sample=False
    )
    return cache


@functools.cache
def generated(share: Sharing | None, visual: KVSpec | str = "text") -> QuantizedCache:
    """A cache that tests read and leave as it is."""
    cache = run(spec_of(share, visual))
    cache.detach()  # it outlives its test, and the model is everybody's
    return cache


def completed(cache: QuantizedCache, store: str, which: str) -> list:
    return [getattr(layer.store._complete(store), which) for layer in cache.layers]


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("visual", ["text", STREAM], ids=["stream", "spans"])
def test_a_layer_reads_its_sources_codes_with_its_own_scales(share, visual) -> None:
    spec = spec_of(share, visual)
    cache, alone = generated(share, visual), generated(None, visual)
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


def prefilled(spec: CacheSpec) -> QuantizedCache:
    """A cache of the same 16-bit K and V for every spec."""
    model, given = tiny_model("internvl"), inputs("internvl", PROMPTS)
    cache = QuantizedCache(model, spec)
    dense = model(**given, past_key_values=DynamicCache(config=model.config)).past_key_values
    visual = given["input_ids"] == model.config.image_token_id
    cache.absorb(dense, visual_mask=visual, attention_mask=given["attention_mask"])
    return cache


@pytest.mark.parametrize("visual", ["text", STREAM], ids=["stream", "spans"])
def test_a_run_keeps_the_weighted_average_of_its_layers_codes(visual) -> None:
    share = SHARES["average-of-three"]
    shared, alone = (prefilled(spec_of(s, visual)) for s in (share, None))
    for name in ("stream",) if visual == "text" else ("stream", "visual"):
        lengths = getattr(shared.ledger.state, name).lengths
        for which in ("key", "value"):
            own = [tensor.unpacked() for tensor in completed(alone, name, which)]
            wanted = average_codes(own, share.weights)
            assert not any(torch.equal(wanted, codes) for codes in own)
            for tensor in completed(shared, name, which):
                for got, want, n in zip(tensor.unpacked(), wanted, lengths, strict=True):
                    assert torch.equal(got[:, :n], want[:, :n])


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_every_decode_step_reads_what_the_step_leaves_behind(share, monkeypatch) -> None:
    """An early layer must not attend before later ones of its run have brought their codes."""
    model, read = tiny_model("internvl"), []

    def recorded(query, segments, **options):
        packed = [s for s in segments if isinstance(s, PackedSegment)]
        read.append([t.dequantize() for s in packed for t in (s.key, s.value)])
        return decode_attention(query, segments, **options)

    monkeypatch.setattr("duotone.hf.cache.attention.decode_attention", recorded)
    cache = QuantizedCache(model, spec_of(share))
    given, grown = inputs("internvl", PROMPTS), set()
    model(**given, past_key_values=cache)
    mask = given["attention_mask"]
    for step in range(9):
        read.clear()
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        ids = torch.tensor([[5 + step], [30 - step]])
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        for layer, tensors in zip(cache.layers, read, strict=True):
            pair = layer.store._complete("stream")
            left = [pair.key.dequantize(), pair.value.dequantize()]
            assert all(map(torch.equal, tensors, left))
        grown.add(cache.layers[0].store.stream.key.tokens)
    assert len(grown) >= 3


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_a_single_visual_token_of_a_later_turn_finds_the_windows_whole(share, monkeypatch) -> None:
    def checked(query, segments, **options):
        assert all(segment.tokens >= int(segment.lengths.max()) for segment in segments)
        return attend_chunk(query, segments, **options)

    monkeypatch.setattr("duotone.hf.cache.attention.attend_chunk", checked)
    model, tokens = tiny_model("internvl"), 15
    visual = torch.zeros(1, tokens, dtype=torch.bool)
    visual[:, 13] = True  # The step at which a group has come together.
    cache = QuantizedCache(model, spec_of(share, STREAM), visual_mask=visual)
    ids = torch.arange(5, 5 + tokens)[None]
    for part in ids.split([9, 1, 1, 1, 1, 1, 1], 1):
        model(input_ids=part, past_key_values=cache)
    state = cache.ledger.state
    assert [int(getattr(state, name).lengths) for name in ("visual", "stream")] == [1, 8]


def test_codes_that_wait_do_not_outlive_a_step_that_broke_off() -> None:
    model = tiny_model("internvl")
    cache = QuantizedCache(model, spec_of(SHARES["average-of-three"]))
    waiting = cache.layers[0].store.runs["key"].waiting
    seen = []

    def fail(*_: object) -> None:
        cache.timeline.commit()
        seen.append(sorted(waiting["stream"]))
        raise KeyError

    hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(**inputs("internvl", PROMPTS), past_key_values=cache)
    hook.remove()
    assert seen == [[0, 1]]
    assert not waiting
    with pytest.raises(RuntimeError, match="reached 2 of 3 layers"):
        cache.memory()
