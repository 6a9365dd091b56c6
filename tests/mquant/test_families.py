"""Tiny models of the real families: quantized whole, saved, loaded, near their base."""

import copy

import pytest
import torch

from duotone.hf.fusion import fuse, is_fused, unfused
from duotone.hf.quantized import load, save
from duotone.hf.weight_maps import FAMILIES as MAPPED
from duotone.hf.weight_maps import weight_map
from duotone.mquant import CalibrationSet, quantize_model
from duotone.weights.quant_linear import QuantLinear
from duotone.weights.recipe import get_recipe

from families import FAMILIES, inputs, tiny_model

OUTSIDE = {"pre_layrnorm", "post_layernorm", "post_conv_layernorm", "head"}
KNOWN = [name for name in FAMILIES if name in MAPPED]


def data_of(name, seed):
    prompts = [[3, "image", 4], ["image", 2]] if FAMILIES[name].is_multimodal else [[7], [4]]
    return inputs(name, prompts, seed)


def logits(model, given):
    with torch.no_grad():
        found = model(**given).logits
    return found[given["attention_mask"].bool()]


@pytest.mark.parametrize("name", KNOWN)
def test_every_part_is_quantized_and_comes_back(name, tmp_path):
    plain = tiny_model(name)
    model = copy.deepcopy(plain)
    data = CalibrationSet([data_of(name, seed) for seed in (1, 2, 3)], {}, [])
    report = quantize_model(model, get_recipe("mquant-w8a8"), data)
    given = data_of(name, 1)
    wanted, found = logits(plain, given), logits(model, given)
    assert (found - wanted).norm() < 0.25 * wanted.norm()
    parts = {line["part"] for line in report["linears"]}
    assert parts == (
        {"vision", "projector", "language"} if "pixel_values" in given else {"language"}
    )
    left = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    inside = {n for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert inside
    # What stays beside the head: a norm's D x D product, and pooling that nobody reads.
    assert not [n for n in left if n != "lm_head" and not set(n.split(".")) & OUTSIDE]
    # Every norm in front of a branch and every MLP of a block hands codes on, and nothing changes.
    blocks = [block for stream in weight_map(model).streams for block in stream.blocks]
    fused = [(b.attention_norm, b.mlp_norm, b.mlp_output.rpartition(".")[0]) for b in blocks]
    assert set(fuse(model)) == {path for paths in fused for path in paths}
    with unfused(model):
        assert not is_fused(model)
        assert torch.equal(logits(model, given), found)
    again = load(save(model, tmp_path / "q"))
    assert is_fused(again)
    assert torch.equal(logits(again, given), found)
