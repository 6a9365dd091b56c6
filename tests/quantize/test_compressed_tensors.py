"""Exports, and what the format's own loader makes of them where it is installed."""

import json

import pytest
import torch

from duotone.hf.weights.checkpoint import model_class
from duotone.hf.weights.compressed_tensors import SIDECAR, check_expressible, export
from duotone.hf.weights.weight_maps import FAMILIES as MAPPED
from duotone.quantize import CalibrationSet, quantize_model
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.modules.int32_packing import pack_int32
from duotone.weights.modules.linear import linear_float, linear_int
from duotone.weights.modules.quant_linear import QuantLinear
from duotone.weights.modules.quantize_rows import quantize

from families import FAMILIES, inputs, new_model
from mquant_setups import quantized, tiny_loaded

EXPRESSIBLE = {
    "rtn-w8a8": "int-quantized",
    "static-msq-w8a8": "int-quantized",
    "dynamic-w8a8": "int-quantized",
    "rtn-dynamic-w4a8": "pack-quantized",
    "w4a16-g128": "pack-quantized",
    "awq-w4a16-g128": "pack-quantized",
}
KNOWN = [name for name in FAMILIES if name in MAPPED]


@pytest.fixture(scope="module", params=EXPRESSIBLE)
def expressible(request, tmp_path_factory):
    """(name, its model, its folder) of every recipe that the format can express."""
    return request.param, *exported(request.param, tmp_path_factory.mktemp("exported"))


def exported(name, folder, **changes):
    changes = {"group": 16} | changes if name.endswith("g128") else changes
    loaded, _ = quantized(name, **changes)
    return loaded, export(loaded.model, folder / "out")


def loaded_by_transformers(folder, model):
    """(the model of a folder, keys that did not fit by kind)."""
    pytest.importorskip("compressed_tensors", reason="needs pip install 'duotone[dev]'")
    again, info = model_class(model.config).from_pretrained(
        folder, dtype=model.dtype, output_loading_info=True
    )
    return again, {kind: set(keys) for kind, keys in info.items() if keys}


def quantized_linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}


def assert_same_weights(again, model):
    for path, linear in quantized_linears(model).items():
        assert torch.equal(again.get_submodule(path).weight, linear.packed.dequantized()), path


def test_words_hold_eight_codes_the_first_in_the_low_bits():
    codes = torch.tensor([[-8, -7, 0, 1, 2, 3, 4, 7, -8, 7, 0]], dtype=torch.int8)
    words = pack_int32(codes)
    assert [hex(word & 0xFFFFFFFF) for word in words[0].tolist()] == ["0xfcba9810", "0x8f0"]
    with pytest.raises(ValueError, match="in \\[-8, 7\\]"):
        pack_int32(codes + 3)


def test_config_and_tensors_are_the_formats(expressible):
    from safetensors.torch import load_file

    name, loaded, folder = expressible
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == EXPRESSIBLE[name]
    assert config["ignore"] == ["lm_head"]
    tensors = load_file(folder / "model.safetensors")
    path = "model.language_model.layers.0.mlp.up_proj"
    linear = loaded.model.get_submodule(path)
    wanted = "weight" if linear.bits == 8 else "weight_packed"
    assert tensors[f"{path}.{wanted}"].dtype == (torch.int8 if linear.bits == 8 else torch.int32)
    sidecar = json.loads((folder / SIDECAR).read_text())
    assert len(sidecar["modality_scales"]) == (21 if "msq" in name else 0)


def test_the_configuration_names_its_model_and_what_stays_16_bit(tmp_path):
    loaded, folder = exported("w4a16-g128", tmp_path, parts=("language",))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["InternVLForConditionalGeneration"]
    plain = {n for n, m in loaded.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(config["quantization_config"]["ignore"]) == plain
    assert any("vision_tower" in name for name in plain)
    assert not any("language_model" in name for name in plain)


def our_product(linear, x):
    """Product of our linear with text at one scale, the larger one of two."""
    if linear.activation == "none":
        return linear_float(x, linear.packed, linear.bias)
    scale = None if linear.scales is None else linear.scales.max()[None]
    rows = quantize(x, scale)
    return linear_int(rows.codes, rows.scale, linear.packed, None, linear.bias, dtype=x.dtype)


def test_its_own_linears_make_the_same_of_their_inputs(expressible):
    name, loaded, folder = expressible
    again, odd = loaded_by_transformers(folder, loaded.model)
    assert not odd
    again(input_ids=torch.tensor([[3, 4]]))  # the first call unpacks the weights
    assert_same_weights(again, loaded.model)
    # Per token it divides by max|x| / 127.5, we by max|x| / 127: up to a step apart.
    limit = 0.02 if "dynamic" in name else 1e-6
    for path, linear in quantized_linears(loaded.model).items():
        x = torch.randn(63, linear.in_features)
        if linear.scales is not None:
            x *= 127 * linear.scales.max() / x.abs().max()
        wanted, found = our_product(linear, x), again.get_submodule(path)(x)
        assert (found - wanted).norm() <= limit * wanted.norm(), path


def test_a_static_code_below_our_lowest_is_the_formats_lowest(tmp_path):
    loaded, folder = exported("rtn-w8a8", tmp_path)
    again, _ = loaded_by_transformers(folder, loaded.model)
    again(input_ids=torch.tensor([[3, 4]]))
    path = "model.language_model.layers.0.mlp.up_proj"
    linear, theirs = (m.get_submodule(path) for m in (loaded.model, again))
    x = torch.zeros(1, linear.in_features)
    x[0, 0] = -200 * linear.scales[0]
    column = linear.packed.dequantized()[:, 0] * linear.scales[0]
    torch.testing.assert_close(our_product(linear, x)[0], -127 * column)
    torch.testing.assert_close(theirs(x)[0], -128 * column)


@pytest.mark.parametrize("name", ["rtn-w8a8", "w4a16-g128"])
def test_a_quantized_language_model_under_a_16_bit_tower_loads(name, tmp_path):
    loaded, folder = exported(name, tmp_path, parts=("language",))
    again, odd = loaded_by_transformers(folder, loaded.model)
    assert not odd
    towers = [m.model.vision_tower.state_dict() for m in (loaded.model, again)]
    assert towers[0].keys() == towers[1].keys()
    assert all(torch.equal(towers[0][key], towers[1][key]) for key in towers[0])


@pytest.mark.parametrize("family", KNOWN)
def test_every_family_comes_back_with_its_logits(family, tmp_path):
    multimodal = FAMILIES[family].is_multimodal
    given = inputs(family, [[3, "image", 4], ["image", 2]] if multimodal else [[7], [4]], 1)
    model = new_model(family)
    recipe = get_recipe("w4a16-g128").replace(group=8)
    if family == "llava_onevision":
        # transformers initialises SigLIP's linears by a weight that packed ones do not have.
        recipe = recipe.replace(parts=("projector", "language"))
    quantize_model(model, recipe, CalibrationSet([given], {}, []))
    again, odd = loaded_by_transformers(export(model, tmp_path / "out"), model)
    assert not odd
    with torch.no_grad():
        torch.testing.assert_close(again(**given).logits, model(**given).logits)


def test_what_the_format_cannot_say_is_refused(tmp_path):
    for name in ("mquant-w8a8", "quarot-w8a8"):
        with pytest.raises(ValueError, match="compressed-tensors expresses"):
            check_expressible(get_recipe(name))
    with pytest.raises(ValueError, match=r"visual_first=True.*static-msq-w8a8"):
        check_expressible(get_recipe("static-msq-aifs-w8a8"))
    loaded, _ = quantized("rtn-w4a8")
    with pytest.raises(ValueError, match="compressed-tensors expresses"):
        export(loaded.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_that_need_padding_are_refused_before_any_work():
    recipe = get_recipe("w4a16-g128")
    check_expressible(recipe, [256, 128])
    with pytest.raises(ValueError, match="multiples of 128, got 96"):
        check_expressible(recipe, [256, 96])


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only a quantized model is exported"):
        export(tiny_loaded().model, tmp_path / "out")
