"""Fused models on a real GPU: near the unfused ones, captured and compiled."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.mquant import random_model
from duotone.bench.timing import CudaClock
from duotone.hf.weights.fusion import is_fused, unfused

pytestmark = pytest.mark.gpu
RECIPES = ("mquant-w8a8", "mquant-w4a8", "dynamic-w4a8", "mquant-down-per-token-w4a8")
RECIPES += ("mquant-head8-w4a8", "mquant-vision8-w4a8", "quarot-per-token-w4a8")
CONTEXT, STEPS = 48, 16


def model(recipe):
    torch.manual_seed(0)
    config = random_model.config(tiny=True, layers=2)
    return random_model.model(config, recipe, torch.device("cuda"))


def relative_error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("recipe", RECIPES)
@torch.inference_mode()
def test_fused_modules_are_near_those_by_themselves(recipe):
    made = model(recipe)
    inputs = random_model.prompt(made, 200, 100)
    assert is_fused(made)
    found = made(**inputs).logits
    with unfused(made):
        wanted = made(**inputs).logits
    # 16-bit roundings between the steps move codes by one, which the layers behind pass on.
    assert relative_error(found, wanted) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
@torch.inference_mode()
def test_a_captured_step_is_the_eager_one(recipe):
    made, clock = model(recipe), CudaClock()
    step = random_model.decode_step(made, CONTEXT, STEPS)
    for _ in range(2):
        step()
    kept = []
    replay = clock.capture([lambda: kept.append(step())])
    for _ in range(2):
        replay()
    again = random_model.decode_step(made, CONTEXT, STEPS)
    wanted = [again() for _ in range(4)][-1]
    assert relative_error(kept[0], wanted) < 0.02


@pytest.mark.parametrize("recipe", RECIPES)
@torch.inference_mode()
def test_a_compiled_step_is_the_eager_one(recipe):
    torch._dynamo.reset()
    made = model(recipe)
    steps = [
        random_model.decode_step(run, CONTEXT, STEPS)
        for run in (made, torch.compile(made, backend="aot_eager"))
    ]
    for _ in range(3):
        wanted, found = (step() for step in steps)
        assert relative_error(found, wanted) < 0.02
