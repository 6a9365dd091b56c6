"""AWQ's scales on tiny models of the real families."""

import pytest
import torch

from duotone.hf.weights.weight_maps import FAMILIES as MAPPED
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.module_map import at
from duotone.weights.methods.awq import pairs_of
from duotone.weights.methods.smooth import fold

from families import FAMILIES, inputs, new_model, tiny_model
from mquant_setups import quantized, tiny_loaded

KNOWN = [name for name in FAMILIES if name in MAPPED]


def pairs(model):
    return [
        pair for s in weight_map(model).streams for b in s.blocks for pair in pairs_of(model, b)
    ]


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits[given["attention_mask"].bool()]


@pytest.mark.parametrize("name", KNOWN)
def test_factors_move_without_a_change_of_the_function(name):
    model = new_model(name)
    given = inputs(name, [[3, "image", 4]] if FAMILIES[name].is_multimodal else [[7, 4]], 1)
    wanted = logits(model, given)
    generator = torch.Generator().manual_seed(0)
    for pair in pairs(model):
        readers = [at(model, path) for path in pair.readers]
        factors = 0.25 + 4 * torch.rand(readers[0].in_features, generator=generator)
        fold(at(model, pair.source), readers, factors, pair.rows)
    torch.testing.assert_close(logits(model, given), wanted, rtol=1e-3, atol=1e-4)


def test_what_shares_its_values_between_heads_is_left_alone():
    model = tiny_model("qwen2_5_vl")
    readers = {path.removeprefix("model.") for pair in pairs(model) for path in pair.readers}
    assert "visual.blocks.0.attn.proj" in readers
    assert "visual.blocks.0.mlp.down_proj" in readers
    assert "language_model.layers.0.mlp.down_proj" in readers
    assert "language_model.layers.0.self_attn.o_proj" not in readers


def test_norms_change_and_lines_say_how_far():
    loaded, report = quantized("awq-w4a16-g128", group=16)
    lines = {line["linear"]: line for line in report["linears"]}
    block = "model.language_model.layers.0"
    line = lines[f"{block}.mlp.up_proj"]
    assert 0 <= line["alpha"] < 1
    assert line["error"] <= line["error_rtn"]
    assert "alpha" not in lines["model.multi_modal_projector.linear_1"]
    moved = [name for name, one in lines.items() if one.get("alpha")]
    assert any(name.startswith("model.language_model") for name in moved)
    norm = f"{block}.post_attention_layernorm"
    same = torch.equal(at(loaded.model, norm).weight, at(tiny_loaded().model, norm).weight)
    assert same == (line["alpha"] == 0)
