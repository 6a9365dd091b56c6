"""Keys divided by a norm of their own per sequence and head, queries multiplied by it."""

from dataclasses import replace

import pytest
import torch

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.attention.reference import attend
from duotone.cache.key_norm import key_norm
from duotone.cache.segments import DenseSegment, PackedSegment
from duotone.quant import quantize

from families import inputs, logit_error, tiny_model

STREAM = KVSpec(TensorSpec(4, "channels", 8), TensorSpec(4, group=4))
SPEC = CacheSpec(visual="text", text=STREAM, sink=2, recent=3, key_norm=True)
# Different lengths: one row of every batch is padded.
PROMPTS = [[3, "image", 9, 8, 7, 6, 5], [4, 11, 12, "image", 13, 21, 22, 23, 24]]


def generate(name: str, spec: CacheSpec | None, steps: int = 10):
    model = tiny_model(name)
    cache = None if spec is None else QuantizedCache(model, spec)
    out = model.generate(
        **inputs(name, PROMPTS),
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return cache, torch.stack(out.logits)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", ["internvl", "qwen2_5_vl", "glm4v", "gemma3"])
def test_normalisation_alone_changes_nothing(name: str) -> None:
    """Behind RoPE, plain, interleaved and in three sections, in a left-padded batch."""
    cache, logits = generate(name, SPEC)
    assert logit_error(logits, generate(name, None)[1]) < 1e-4
    norms = cache.layers[0].store.key_norm
    assert not torch.allclose(norms[0], norms[1])


def test_the_norm_is_the_root_of_the_largest_key() -> None:
    key = torch.randn(2, 3, 9, 8)
    key[1, :, 5:] = torch.nan
    norm = key_norm(key, torch.tensor([9, 5]), "float32")
    for b, n in ((0, 9), (1, 5)):
        assert torch.allclose(norm[b], key[b, :, :n].abs().amax(1).sqrt())
    assert torch.equal(
        key_norm(0 * key[:1], torch.tensor([9]), "float16"), torch.ones(1, 3, 8).half()
    )


def test_it_evens_out_outlier_channels() -> None:
    """What it is for: one loud channel does not take the levels of its group."""
    torch.manual_seed(0)
    key = torch.randn(1, 1, 64, 16)
    key[..., 3] *= 30
    spec, lengths = TensorSpec(2, "channels", 16), torch.tensor([64])
    norm = key_norm(key, lengths, "float16")
    plain = quantize(key, spec).dequantize()
    normed = quantize(key / norm[:, :, None], spec).dequantize() * norm[:, :, None]
    quiet = [i for i in range(16) if i != 3]
    errors = [(x - key)[..., quiet].square().mean() for x in (plain, normed)]
    assert errors[1] < 0.5 * errors[0]


def test_scores_come_from_the_normalised_query() -> None:
    cache, _ = generate("internvl", SPEC)
    for layer in cache.layers:
        packed, dense = layer.store.segments(cache.ledger.state)
        assert isinstance(packed, PackedSegment)
        assert packed.key_norm is not None
        query = torch.randn(2, 4, 1, 16)
        plain = DenseSegment(packed.states("key"), packed.states("value"), packed.lengths)
        ours, theirs = (attend(query, [s, dense], sm_scale=0.25) for s in (packed, plain))
        assert torch.allclose(ours, theirs, atol=1e-4)
        without = replace(packed, key_norm=None)
        assert not torch.allclose(ours, attend(query, [without, dense], sm_scale=0.25), atol=1e-2)


def test_it_follows_beams_and_survives_the_disk(tmp_path) -> None:
    cache, _ = generate("internvl", SPEC)
    before = cache.layers[1].store.key_norm
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[1].store.key_norm, before.flip(0))
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", tiny_model("internvl"))
    assert torch.equal(loaded.layers[1].store.key_norm, before.flip(0))
    assert loaded.memory() == cache.memory()
    cache.reset()
    assert cache.layers[1].store.key_norm is None


def test_a_plan_counts_the_norms() -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 9, 8, 7, 6, 5, 4, 3, 2, 1, 10]])
    cache = QuantizedCache(model, SPEC)
    model.generate(**given, past_key_values=cache, max_new_tokens=9, do_sample=False)
    tokens = given["input_ids"].shape[1]
    planned = duotone.plan(model, SPEC, visual_tokens=4, text_tokens=tokens - 4, new_tokens=8)
    assert planned.params_bytes == cache.memory().params_bytes
