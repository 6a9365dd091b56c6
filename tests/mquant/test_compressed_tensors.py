"""Exports, and what the format's own loader makes of them where it is installed."""

import json

import pytest
import torch
import transformers

from duotone.hf.compressed_tensors import SIDECAR, check_expressible, export
from duotone.weights.int32_packing import pack_int32
from duotone.weights.quant_linear import QuantLinear
from duotone.weights.recipe import get_recipe

from mquant_setups import quantized, tiny_loaded

EXPRESSIBLE = {
    "rtn-w8a8": "int-quantized",
    "static-msq-w8a8": "int-quantized",
    "rtn-dynamic-w4a8": "pack-quantized",
    "w4a16-g128": "pack-quantized",
}


def exported(name, folder):
    loaded, _ = quantized(name, **({"group": 16} if name == "w4a16-g128" else {}))
    return loaded, export(loaded.model, folder / "out")


def test_words_hold_eight_codes_the_first_in_the_low_bits():
    codes = torch.tensor([[-8, -7, 0, 1, 2, 3, 4, 7, -8, 7, 0]], dtype=torch.int8)
    words = pack_int32(codes)
    assert [hex(word & 0xFFFFFFFF) for word in words[0].tolist()] == ["0xfcba9810", "0x8f0"]
    with pytest.raises(ValueError, match="in \\[-8, 7\\]"):
        pack_int32(codes + 3)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_config_and_tensors_are_the_formats(name, tmp_path):
    from safetensors.torch import load_file

    loaded, folder = exported(name, tmp_path)
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


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_its_own_loader_finds_the_same_weights(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    loaded, folder = exported(name, tmp_path)
    again = transformers.AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    linears = {n: m for n, m in loaded.model.named_modules() if isinstance(m, QuantLinear)}
    for path, linear in linears.items():
        found = again.get_submodule(path).weight
        torch.testing.assert_close(found.float(), linear.packed.dequantized(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mquant-w8a8", "rtn-w4a8", "quarot-w8a8"])
def test_what_the_format_cannot_say_is_refused(name, tmp_path):
    loaded, _ = quantized(name)
    with pytest.raises(ValueError, match="compressed-tensors expresses"):
        export(loaded.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_order_of_tokens_is_refused_before_any_work():
    with pytest.raises(ValueError, match=r"visual_first=True.*static-msq-w8a8"):
        check_expressible(get_recipe("static-msq-aifs-w8a8"))


def test_sizes_that_need_padding_are_refused_before_any_work():
    recipe = get_recipe("w4a16-g128")
    check_expressible(recipe, [256, 128])
    with pytest.raises(ValueError, match="multiples of 128, got 96"):
        check_expressible(recipe, [256, 96])


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only a quantized model is exported"):
        export(tiny_loaded().model, tmp_path / "out")
