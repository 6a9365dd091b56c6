"""Keys divided by a norm of their own per sequence and head, queries multiplied by it."""

import pytest
import torch

from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.cache.key_norm import key_norm

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
