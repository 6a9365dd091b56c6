"""Keys divided by a norm of their own per sequence and head, queries multiplied by it."""

import pytest
import torch
from test_generate import assert_same_run, batch_of, run

from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.cache.key_norm import key_norm

from families import tiny_model

STREAM = KVSpec(TensorSpec(4, "channels", 8), TensorSpec(4, group=4))
SPEC = CacheSpec(visual="text", text=STREAM, sink=2, recent=3, key_norm=True)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", ["internvl", "qwen2_5_vl", "glm4v", "gemma3"])
def test_normalisation_alone_changes_nothing(name: str) -> None:
    """Behind RoPE, plain, interleaved and in three sections, in a left-padded batch."""
    model, given = tiny_model(name), batch_of(name)
    assert_same_run(run(model, given, SPEC), run(model, given))


def test_the_norm_is_the_root_of_the_largest_key() -> None:
    key = torch.randn(2, 3, 9, 8)
    key[1, :, 5:] = torch.nan
    norm = key_norm(key, torch.tensor([9, 5]), "float32")
    for b, n in ((0, 9), (1, 5)):
        assert torch.allclose(norm[b], key[b, :, :n].abs().amax(1).sqrt())
    assert torch.equal(
        key_norm(0 * key[:1], torch.tensor([9]), "float16"), torch.ones(1, 3, 8).half()
    )
