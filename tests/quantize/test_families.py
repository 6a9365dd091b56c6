"""Tiny models of the real families: quantized whole, saved, loaded, near their base."""

import copy

import pytest
import torch
from transformers import AutoModelForImageTextToText

from duotone.hf.weights.checkpoint import load, save
from duotone.hf.weights.counted import recipe_bytes
from duotone.hf.weights.fusion import fuse, is_fused, unfused
from duotone.hf.weights.weight_maps import FAMILIES as MAPPED
from duotone.hf.weights.weight_maps import weight_map
from duotone.quantize import CalibrationSet, quantize_model
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.modules.quant_linear import QuantLinear

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
    recipe = get_recipe("mquant-w8a8")
    report = quantize_model(model, recipe, data)
    bounds = [recipe_bytes(plain, recipe.replace(split=s))["total"] for s in ("never", "eq8")]
    assert bounds[0] <= report["bytes"]["after"]["total"] <= bounds[1] < 1.02 * bounds[0]
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


def test_a_stream_that_no_hadamard_covers_is_refused_before_any_work(tmp_path):
    """66 channels; GLM's sandwich norms need an online transform, which cannot be padded."""
    config = FAMILIES["glm4v"].config()
    config.text_config.update(
        {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 22}
    )
    config.text_config.rope_parameters["mrope_section"] = [3, 4, 4]
    config.vision_config.out_hidden_size = 66
    model = AutoModelForImageTextToText.from_config(config)
    data, kept = CalibrationSet([], {}, []), tmp_path / "partial"
    with pytest.raises(ValueError, match=r"no Hadamard transform covers 66 = 33 \* 2"):
        quantize_model(model, get_recipe("mquant-w4a8"), data, partial=kept)
    assert not kept.exists()


def tokens_seen(model, data):
    """Rows that counted in the ranges of the vision tower's linears."""
    recipe = get_recipe("rtn-w8a8").replace(parts=("vision",))
    report = quantize_model(copy.deepcopy(model), recipe, CalibrationSet([data], {}, []))
    return {line["linear"].split("layers.0.")[-1]: line["tokens"] for line in report["linears"]}


def test_tiles_that_only_fill_up_a_batch_do_not_reach_the_tower():
    """LLaVA-NeXT and -OneVision: two pictures, of two and of three tiles; the fourth is padding."""
    config = FAMILIES["llava_onevision"].config()
    config.image_grid_pinpoints = [[16, 16], [16, 32]]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    pictures = torch.randn(2, 3, 3, 16, 16)
    pictures[0, 2] = 1e4
    # 16 features and 4 rows of 4 and a newline; 16 and 4 rows of 8 and a newline.
    counts = (16 + 4 * 5, 16 + 4 * 9)
    ids = [[0] * (counts[1] - n) + [3] + [290] * n + [4] for n in counts]
    given = {
        "input_ids": torch.tensor(ids),
        "attention_mask": (torch.tensor(ids) != 0).long(),
        "pixel_values": pictures,
        "image_sizes": torch.tensor([[16, 16], [16, 32]]),
    }
    seen = tokens_seen(model, given)
    assert {tuple(tokens.items()) for tokens in seen.values()} == {(("text", 5 * 16),)}


def test_windows_of_qwen2_5_vl_are_ragged_and_hold_no_padding():
    """12 x 4 patches in windows of 4 x 4 merged ones: three by one and a half."""
    model = tiny_model("qwen2_5_vl")
    given = inputs("qwen2_5_vl", [[3, "image", "image", "image"]], 1)
    given["image_grid_thw"] = torch.tensor([[1, 12, 4]])
    seen = tokens_seen(model, given)
    assert {tokens["text"] for name, tokens in seen.items()} == {48}
