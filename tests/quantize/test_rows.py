"""Named recipes against plain torch on the first layer of a tiny model, whose inputs are exact."""

import copy

import pytest
import torch

from duotone.hf.weights.equivalences import Equivalences, apply_equivalences
from duotone.quantize import quantize_model
from duotone.weights.equivalences.module_map import at
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.methods.rtn import round_to_nearest, weight_scale

from mquant_setups import tiny_data, tiny_loaded
from plain_rows import inputs_of, matrix_of, per_token, plain_gptq

LAYER = "model.language_model.layers.0"
# Of codes: sums in float32 fall on the other side of a boundary now and then.
EQUAL = 0.995


@pytest.fixture(scope="module")
def setting():
    """(model in 16 bit, calibration batches)."""
    loaded = tiny_loaded()
    return loaded.model, tiny_data(loaded)


def language_only(model, data, name):
    """A copy whose language model alone is quantized, so that the first inputs are exact."""
    made = copy.deepcopy(model)
    quantize_model(made, get_recipe(name).replace(parts=("language",)), data)
    return made


def dense(linear):
    """Weights [out, columns] of a quantized linear."""
    return linear.packed.dequantized().double()


def assert_codes(linear, weight, moments, clip):
    """Codes of a linear are the plain GPTQ's of `weight`, with the same scales."""
    bits, high = linear.bits, {4: 7, 8: 127}[linear.bits]
    scale = weight_scale(weight.float(), bits, None, clip)
    torch.testing.assert_close(linear.weight_scale, scale, rtol=1e-4, atol=0)
    wanted = plain_gptq(weight, moments, linear.weight_scale, high)
    found = dense(linear) / linear.weight_scale[:, None]
    assert (found.round() == wanted).double().mean() > EQUAL
    plain = round_to_nearest(weight.float(), bits, None, clip)[0]
    assert (plain == wanted).double().mean() < EQUAL


@pytest.mark.parametrize("name", ["smoothquant-gptq-w4a8", "smoothquant-gptq-dynamic-w4a8"])
def test_smoothquant_with_gptq_is_the_plain_one(setting, name):
    model, data = setting
    path = f"{LAYER}.mlp.up_proj"
    x = inputs_of(model, path, data.batches)
    weights = [at(model, f"{LAYER}.mlp.{n}_proj").weight.double() for n in ("gate", "up")]
    largest = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    s = x.abs().amax(0).sqrt() / largest.sqrt()
    found = language_only(model, data, name)
    # Attention runs on integers by then, but a block is observed while it is 16 bit.
    assert_codes(at(found, path), weights[1] * s, (x / s).T @ (x / s), clip=True)


@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp.down_proj"])
def test_quarot_per_token_is_the_plain_one(setting, path):
    """o_proj and down_proj read T x: GPTQ of W T^T on moments of T x, a scale per token."""
    model, data = setting
    whole = f"{LAYER}.{path}"
    found = at(language_only(model, data, "quarot-per-token-w4a8"), whole)
    plain = copy.deepcopy(model)
    apply_equivalences(plain, Equivalences(values=False, mlp_output=False))
    x = inputs_of(plain, whole, data.batches)
    t, weight = matrix_of(found.plan), at(plain, whole).weight.double()
    rotated = x @ t.T
    assert_codes(found, weight @ t.T, rotated.T @ rotated, clip=True)
    assert found.activation == "dynamic"
    wanted = per_token(rotated) @ dense(found).T
    given = found(x.float()).double()
    assert (given - wanted).norm() < 2e-3 * wanted.norm()
    unrotated = per_token(x) @ weight.T
    assert (given - unrotated).norm() > 2e-3 * wanted.norm()


def test_o_proj_reads_all_heads_through_one_transform(setting):
    model, data = setting
    found = at(language_only(model, data, "quarot-per-token-w8a8"), f"{LAYER}.self_attn.o_proj")
    t = matrix_of(found.plan)
    assert found.plan.blocks == 1
    eye = torch.eye(found.plan.size, dtype=torch.float64)
    torch.testing.assert_close(t.T @ t, eye, rtol=0, atol=1e-12)
