"""LLaVA with Gemma text, whose norms multiply by 1 + weight: equivalences change nothing."""

import family_configs as configs
import pytest
import torch
from family_configs import IMAGE
from torch import nn
from transformers import AutoModelForImageTextToText

from duotone.hf.weights.equivalences import Equivalences, apply_equivalences, check_norms
from duotone.hf.weights.quantizable import check
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.module_map import at, put
from duotone.weights.equivalences.norms import norm_parts
from duotone.weights.methods.awq import pairs_of
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.methods.smooth import fold, smooth

from exactly import FP64, no_rounding, relative_error, scramble

NORM = "model.language_model.layers.1.input_layernorm"


def llava_gemma(text: str = "gemma", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    config = configs._config(
        "LlavaConfig",
        vision_config=configs._clip_vision(model_type="clip_vision_model"),
        text_config=configs._text(text, head_dim=16),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    model = AutoModelForImageTextToText.from_config(config).eval().to(dtype)
    return scramble(model)


def logits(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.tensor([5, 9]), torch.full((16,), IMAGE), torch.arange(20, 31)])
    pixels = torch.randn(1, 3, 16, 16, generator=generator).to(model.dtype)
    with torch.no_grad(), no_rounding():
        return model(input_ids=ids[None], pixel_values=pixels).logits


def blocks(model: nn.Module) -> list:
    return [block for stream in weight_map(model).streams for block in stream.blocks]


def smoothed(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for block in blocks(model):
        for branch in block.branches:
            linears = [at(model, path) for path in branch.inputs]
            largest = 0.1 + 9 * torch.rand(linears[0].in_features, generator=generator)
            smooth(at(model, branch.norm), linears, largest)


def scaled(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for block in blocks(model):
        for pair in pairs_of(model, block):
            readers = [at(model, path) for path in pair.readers]
            factors = 0.25 + 4 * torch.rand(readers[0].in_features, generator=generator)
            fold(at(model, pair.source), readers, factors, pair.rows)


def turned(model: nn.Module) -> None:
    with no_rounding():
        apply_equivalences(model, Equivalences())


# Factors and columns are computed in float32, whatever the model's type.
EXACT = {"smoothquant": (smoothed, 1e-5), "awq": (scaled, 1e-5), "rotation": (turned, FP64)}


@pytest.mark.parametrize(("change", "tolerance"), EXACT.values(), ids=EXACT)
def test_the_function_stays(change, tolerance) -> None:
    model = llava_gemma()
    before = logits(model)
    assert norm_parts(at(model, NORM)).offset == 1
    weight = at(model, NORM).weight.clone()
    change(model)
    now = getattr(at(model, NORM), "weight", None)
    assert now is None or (now - weight).abs().max() > 0.1
    assert relative_error(logits(model), before) < tolerance


@pytest.mark.parametrize("factor", [1.7, 16.0, 300.0, 1e6])
def test_16_bit_weights_near_minus_one_lose_nothing(factor: float) -> None:
    """The readers take the factor that the rounded weight stands for."""
    model = llava_gemma(dtype=torch.bfloat16)
    norm = at(model, NORM)
    reader = nn.Linear(64, 8, bias=False)
    x, gain = torch.randn(3, 64), 1 + norm.weight.float()
    before = reader(gain * x)
    fold(norm, [reader], torch.full((64,), factor))
    assert torch.isfinite(norm.weight).all()
    after = reader((1 + norm.weight.float()) * x)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["gemma2", "gemma3_text"])
def test_norms_of_a_branch_that_the_map_does_not_know_are_named(text: str) -> None:
    model = llava_gemma(text, torch.float32)
    message = r"layers\.0\.pre_feedforward_layernorm \(Gemma.RMSNorm\) besides"
    with pytest.raises(ValueError, match=message):
        weight_map(model)


class Odd(nn.RMSNorm):
    """Multiplies by the weight's exponential."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight.exp(), self.eps)


@pytest.mark.parametrize("recipe", ["smoothquant-w8a8", "awq-w4a8", "quarot-w4a8"])
def test_a_norm_of_no_known_kind_is_named_before_a_weight_changes(recipe: str) -> None:
    model = llava_gemma(dtype=torch.float32)
    put(model, NORM, Odd(64, eps=1e-6))
    before = {name: p.clone() for name, p in model.named_parameters()}
    message = r"layers\.1\.input_layernorm: expected .* got Odd"
    with pytest.raises(ValueError, match=message):
        check(model, get_recipe(recipe))
    with pytest.raises(ValueError, match=message):
        check_norms(model, weight_map(model))
    with pytest.raises(ValueError, match=message):
        apply_equivalences(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    check(model, get_recipe("rtn-w8a8"))
