"""How strongly a model reads each channel of K and V, from its weights."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import QuantizedCache
from duotone.hf.facts import model_facts, rotary_pairs
from duotone.hf.read_power import read_powers

from families import FAMILIES, inputs, tiny_model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    found = [b for b in model.modules() if hasattr(getattr(b, "self_attn", None), "layer_idx")]
    return sorted(found, key=lambda block: block.self_attn.layer_idx)


def rotation_partners(attention: nn.Module, head_dim: int) -> Tensor:
    """Which channel the model's own rotation brings to each one."""
    module = sys.modules[type(attention).__module__]
    rotate = getattr(module, "rotate_half_llm", None) or module.rotate_half
    return rotate(torch.eye(head_dim)).abs().argmax(-1)


def measured_query_power(block: nn.Module, heads: tuple[int, int, int]) -> Tensor:
    """E[q_c^2] over the query heads of a kv head, for white input, before RoPE."""
    attention = block.self_attn
    x = torch.randn(20_000, attention.q_proj.in_features)
    q = attention.q_proj(block.input_layernorm(x)).unflatten(-1, heads)
    q = attention.q_norm(q) if hasattr(attention, "q_norm") else q
    return q.square().mean(0).mean(1)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_powers_are_what_white_input_gives(name: str) -> None:
    model = tiny_model(name)
    facts = model_facts(model)
    heads = (facts.kv_heads, facts.q_heads // facts.kv_heads, facts.head_dim)
    for block, read in zip(blocks_of(model), read_powers(model, facts), strict=True):
        power = measured_query_power(block, heads)
        power = (power + power[:, rotation_partners(block.self_attn, facts.head_dim)]) / 2
        for head in range(facts.kv_heads):
            assert torch.allclose(
                read.key[head] / read.key[head].mean(), power[head] / power[head].mean(), rtol=0.15
            )
        output = block.self_attn.o_proj(torch.eye(facts.q_heads * facts.head_dim)).square().sum(-1)
        assert torch.allclose(read.value, output.view(heads).sum(1), rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_pairs_are_the_models_own(name: str) -> None:
    model = tiny_model(name)
    head_dim = model_facts(model).head_dim
    attention = blocks_of(model)[0].self_attn
    pairs = rotary_pairs(model.config, head_dim)
    rope = model.config.get_text_config(decoder=True).rope_parameters
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    assert torch.equal(pairs[:rotated], rotation_partners(attention, rotated))
    assert torch.equal(pairs[rotated:], torch.arange(rotated, head_dim))


def test_weights_that_cannot_be_read_give_nothing() -> None:
    model = tiny_model("internvl")
    odd = replace(model_facts(model), q_heads=8)
    assert all(read.key is read.value is None for read in read_powers(model, odd))


def test_a_channel_that_nobody_reads_gets_no_bits() -> None:
    model = tiny_model("internvl")
    spec = duotone.scheme("duotone")
    value = spec.visual.value.replace(classes=((2, 1 / 2),))
    key = spec.visual.key.replace(classes=((2, 1 / 2),))
    spec = spec.replace(visual=duotone.KVSpec(key, value))
    projection = blocks_of(model)[0].self_attn.o_proj.weight
    kept = projection.detach().clone()
    with torch.no_grad():
        projection.view(-1, 4, 16)[:, :2, 5] = 0
    try:
        cache = QuantizedCache(model, spec)
        model.generate(
            **inputs("internvl", [[3, "image", 9]]), past_key_values=cache, max_new_tokens=2
        )
    finally:
        with torch.no_grad():
            projection.copy_(kept)
    packed = cache.layers[0].store.visual.value
    # Class 1 of ((2, 1/2),) is the class of 0 bits.
    assert (packed.channel_order[:, 0, :, 8:] == 5).any(-1).all()
    cache.reset()
    assert cache.layers[0].store.read.value is not None
