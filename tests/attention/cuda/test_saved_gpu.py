"""Decoding on a real GPU from tokens, lengths and tables that came from a file."""

from pathlib import Path

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from transformers import LlamaConfig, LlamaForCausalLM

import duotone
from duotone import KVSpec, QuantizedCache, TensorSpec

pytestmark = NEEDS_KERNELS
ONE = KVSpec(TensorSpec(1), TensorSpec(1))
STREAM = duotone.scheme("kivi", bits=2).replace(sink=0, recent=32)
SPECS = {
    "spans": STREAM.replace(visual=ONE, ranges="run"),
    "classes": STREAM.replace(visual=duotone.scheme("duotone").visual),
    "background": STREAM.replace(visual=ONE, background=ONE),
    "groups": duotone.scheme("innerq", bits=2),
}
PROMPT, STEPS = 300, 4


def loaded_and_kept(
    name: str, folder: Path, device: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [steps, batch, vocabulary] of a cache from a file, and of the one that was saved."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval().to(device, torch.bfloat16)
    embeds = model.get_input_embeddings()(torch.randint(300, (3, PROMPT + STEPS), device=device))
    mask = torch.ones(3, PROMPT + STEPS, dtype=torch.long, device=device)
    mask[1, :77], mask[2, :250] = 0, 0
    visual = torch.zeros(3, PROMPT, dtype=torch.bool, device=device)
    visual[:2, 100:164], visual[:, 260:291] = True, True
    kept = QuantizedCache(model, SPECS[name], visual_mask=visual, impl=impl)
    model(inputs_embeds=embeds[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=kept)
    kept.save(folder / "cache.safetensors")
    loaded = QuantizedCache.load(folder / "cache.safetensors", model, visual_mask=visual, impl=impl)
    said = []
    for cache in (loaded, kept):
        steps = [
            model(
                inputs_embeds=embeds[:, end - 1 : end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
            ).logits[:, -1]
            for end in range(PROMPT + 1, PROMPT + STEPS + 1)
        ]
        said.append(torch.stack(steps).float())
    return said[0], said[1]


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_a_loaded_cache_decodes_as_the_saved_one(name: str, tmp_path: Path) -> None:
    loaded, kept = loaded_and_kept(name, tmp_path, "cuda", "auto")
    assert loaded.isfinite().all()
    assert (loaded - kept).norm() / kept.norm() < 1e-3
