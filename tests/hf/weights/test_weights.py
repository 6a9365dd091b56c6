"""Every equivalence on tiny models of the real families: the same logits, pixels included."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaNextConfig

from duotone.hf.weights.equivalences import Equivalences, apply_equivalences
from duotone.hf.weights.weight_maps import FAMILIES as MAPPED
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.module_map import at
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.equivalences.residual import has_layer_norms, mean_is_read, rotate_stream
from duotone.weights.equivalences.rotation import keeping_mean, random_orthogonal

from exactly import FP32, FP64, assert_same, exact_norms, relative_error, rounding_as, scramble
from families import FAMILIES, IMAGE, inputs, new_model, tiny_model

PROMPTS = [[3, "image", 5], [2, "image", 4, "image", 6]]
STEPS = {
    "stream": Equivalences(values=False, mlp_output=False),
    "values": Equivalences(stream=False, mlp_output=False),
    "mlp_output": Equivalences(stream=False, values=False),
    "attention_output": Equivalences(
        stream=False, values=False, attention_output=True, mlp_output=False
    ),
    "all": Equivalences(seed=5),
}
NAMES = [name for name in MAPPED if name in FAMILIES]


def variant(name):
    """Models that tests/hf/families.py does not have."""
    clip, siglip = FAMILIES["llava"].config(), FAMILIES["llava_onevision"].config()
    if name == "llava-siglip":
        config = LlavaConfig(
            vision_config=siglip.vision_config,
            text_config=clip.text_config,
            image_token_index=IMAGE,
            image_seq_length=16,
            vision_feature_layer=[-2, -1],
            vision_feature_select_strategy="full",
        )
        return config, "llava"
    if name == "internvl-llama":
        config = FAMILIES["internvl"].config()
        config.text_config = clip.text_config
        return config, "internvl"
    config = LlavaNextConfig(
        vision_config=clip.vision_config,
        text_config=clip.text_config,
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 16]],
    )
    return config, "llava_onevision"


VARIANTS = ("llava-siglip", "internvl-llama", "llava_next")


def made(name, dtype=torch.float64):
    """A scrambled model and inputs for it."""
    if name in FAMILIES:
        model, family = new_model(name), name
    else:
        torch.manual_seed(0)
        config, family = variant(name)
        model = AutoModelForImageTextToText.from_config(config)
        model.eval()
    scramble(model)
    prompts = PROMPTS if FAMILIES[family].is_multimodal else [[11], [7]]
    given = inputs(family, prompts)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    model = model.to(dtype)
    return (exact_norms(model) if dtype == torch.float64 else model), given


def logits(model, given):
    """Logits at real tokens: padding has none that anybody reads."""
    with torch.no_grad(), rounding_as(model.dtype):
        out = model(**given).logits
    return out[given["attention_mask"].bool()]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_the_model_computes_the_same(name, step):
    model, given = made(name)
    expected = logits(model, given)
    apply_equivalences(model, STEPS[step])
    assert_same(logits(model, given), expected, FP64)


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_the_model_computes_the_same_in_float32(name):
    model, given = made(name, torch.float32)
    expected = logits(model, given)
    apply_equivalences(model, STEPS["all"])
    assert_same(logits(model, given), expected, FP32)


def parts_of(model):
    """(stream name, field, path) of everything outside the blocks that a stream is told of."""
    found = weight_map(model)
    return [
        (stream.name, field, path)
        for stream in found.streams
        for field in ("writers", "tables", "vectors", "readers")
        for path in getattr(stream, field)
    ]


def without(stream, field, path):
    return replace(stream, **{field: tuple(p for p in getattr(stream, field) if p != path)})


@pytest.mark.parametrize("name", ["internvl", "llava_onevision", "qwen2_vl", "qwen3_vl"])
def test_every_part_of_a_map_matters(name):
    """A stream that is not told of one writer, vector or reader computes something else."""
    parts = parts_of(made(name)[0])
    assert len(parts) >= 5
    for stream_name, field, path in parts:
        model, given = made(name)
        expected = logits(model, given)
        stream = without(weight_map(model).stream(stream_name), field, path)
        rotate_stream(model, stream)
        assert relative_error(logits(model, given), expected) > 1e-6, (field, path)


@pytest.mark.parametrize(
    ("name", "layer_norms", "reads_mean", "after"),
    [
        ("qwen2_vl", True, False, "RMSNorm"),
        ("qwen2_5_vl", False, False, "RMSNorm"),
        ("internvl", True, True, "LayerNorm"),
        ("llava", True, True, "LayerNorm"),
        ("qwen3_vl", True, True, "LayerNorm"),
    ],
)
def test_which_towers_lose_their_mean(name, layer_norms, reads_mean, after):
    model, _ = made(name)
    stream = weight_map(model).stream("vision")
    assert has_layer_norms(model, stream) is layer_norms
    assert mean_is_read(model, stream) is reads_mean
    apply_equivalences(model)
    norm = at(model, stream.blocks[0].mlp_norm)
    assert type(norm).__name__ == after
    assert list(norm.parameters()) == []


def test_any_orthogonal_matrix_will_do():
    model, given = made("llava")
    expected = logits(model, given)
    for stream in weight_map(model).streams:
        rotate_stream(model, stream, random_orthogonal(stream.channels, seed=4))
    assert_same(logits(model, given), expected)


def test_a_mean_that_is_read_must_be_kept(monkeypatch):
    """Centring InternVL's tower, as MQuant's code does, changes what its projector sees."""
    model, given = made("internvl")
    expected = logits(model, given)
    residual = "duotone.weights.equivalences.residual"
    monkeypatch.setattr(f"{residual}.mean_is_read", lambda model, stream: False)
    apply_equivalences(model)
    assert relative_error(logits(model, given), expected) > 1e-3
    assert not torch.equal(keeping_mean(random_orthogonal(8)), random_orthogonal(8))


def test_a_tied_head_gets_its_own_weight():
    model, given = made("internvl")
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    expected = logits(model, given)
    apply_equivalences(model)
    assert model.config.tie_word_embeddings is False
    assert model.lm_head.weight is not model.model.language_model.embed_tokens.weight
    assert_same(logits(model, given), expected)


def test_bad_models_are_refused_before_any_work():
    with pytest.raises(ValueError, match=r"'smolvlm' models cannot be transformed.*internvl"):
        apply_equivalences(tiny_model("smolvlm"))
    model, given = made("llama")
    expected = logits(model, given)
    model.model.layers[2].mlp.down_proj = torch.nn.Linear(107, 64).double()
    with pytest.raises(ValueError, match=r"no Hadamard transform covers 107 .*allow padding"):
        apply_equivalences(model, Equivalences(pad=False))
    model.model.layers[2] = made("llama")[0].model.layers[2]
    assert_same(logits(model, given), expected, 0)
    apply_equivalences(model)
    with pytest.raises(ValueError, match="rotated already"):
        apply_equivalences(model)


def test_padded_weights_are_zero_and_bias_free():
    """The released code leaves random columns and a random bias behind a padded size."""
    model, _ = made("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = (
            torch.nn.Linear(64, 100 - 9, bias=False).double() for _ in range(2)
        )
        layer.mlp.down_proj = torch.nn.Linear(100 - 9, 64, bias=False).double()
    expected_weight = model.model.layers[0].mlp.down_proj.weight.clone()
    apply_equivalences(model, Equivalences(stream=False, values=False))
    down = model.model.layers[0].mlp.down_proj
    assert isinstance(down, RotatedInput)
    assert (down.plan.size, down.plan.padded, down.linear.bias) == (91, 128, None)
    assert down.linear.weight.norm().item() == pytest.approx(expected_weight.norm().item())


def test_quantized_models_are_refused():
    model, _ = made("qwen2")
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="'qwen2' model is quantized already"):
        apply_equivalences(model)
    model, _ = made("qwen2")
    packed = torch.zeros(8, dtype=torch.uint8)
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match=r"lm_head.weight is packed"):
        apply_equivalences(model)


def test_a_map_that_does_not_fit_is_refused():
    model, _ = made("qwen2_vl")
    del model.model.visual.merger.ln_q
    with pytest.raises(ValueError, match=r"'ln_q' is missing in PatchMerger"):
        weight_map(model)
    with pytest.raises(ValueError, match=r"has streams \['language'\]; got 'vision'"):
        weight_map(tiny_model("qwen2")).stream("vision")
