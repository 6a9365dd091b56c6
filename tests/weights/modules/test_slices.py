"""AIFS by two slices: the same numbers as a scale per row, by every implementation that slices."""

import pytest
import torch

from duotone.weights.equivalences.reorder import inverse, take, visual_first
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.linear import linear_int
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quant_linear import QuantLinear
from duotone.weights.modules.slices import linear_by_slices

from linear_cases import DEVICE, random_problem

SCALES = torch.tensor([0.031, 0.7], device=DEVICE)
needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")


def by_rows(problem, first, impl="reference"):
    rows = torch.arange(len(problem.x_q), device=DEVICE) < first
    scale = torch.where(rows, SCALES[1], SCALES[0])
    given = (problem.x_q, scale, *problem.arguments[2:])
    return linear_int(*given, impl=impl, dtype=torch.float32)


def by_slices(problem, first, impl="reference"):
    given = (problem.x_q, SCALES, first, *problem.arguments[2:])
    return linear_by_slices(*given, impl=impl, dtype=torch.float32)


@pytest.mark.parametrize("first", [0, 1, 7, 19])
@pytest.mark.parametrize("bits", [4, 8])
def test_slices_are_rows_bit_by_bit(bits, first):
    problem = random_problem(19, 9, 100, bits, split=True, bias=True)
    assert torch.equal(by_slices(problem, first), by_rows(problem, first))
    other = by_rows(problem, first + 1 if first < 19 else 0)
    assert not torch.equal(by_slices(problem, first), other)


@needs_kernels
@pytest.mark.parametrize(("impl", "bits"), [("w8a8", 8), ("w4a8-scratch", 4)])
def test_kernels_write_both_slices_into_one_result(impl, bits):
    problem = random_problem(40, 21, 1104, bits, split=True, bias=True)
    assert torch.equal(by_slices(problem, 23, impl), by_rows(problem, 23))


@needs_kernels
@pytest.mark.parametrize(("impl", "bits"), [("gemv", 4), ("w4a8-fused", 4), ("w8a8-split", 8)])
def test_results_of_few_tokens_are_copied(impl, bits):
    problem = random_problem(1 if impl == "gemv" else 3, 21, 1104, bits)
    out = torch.full((len(problem.x_q), 21), torch.nan, device=DEVICE)
    found = linear_int(*problem.arguments, impl=impl, dtype=torch.float32, out=out)
    assert found is out
    wanted = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    assert torch.equal(out, wanted)


def modal_linear(modality):
    torch.manual_seed(3)
    codes = torch.randint(-127, 128, (5, 12), dtype=torch.int8)
    weight = PackedWeight(codes, 8, torch.rand(5) + 0.1, None, None)
    return QuantLinear(weight, scales=torch.tensor([0.03, 0.5]), modality=modality)


def test_a_reordered_linear_is_the_linear_reordered(monkeypatch):
    modality, slices = Modality(), []
    linear, x = modal_linear(modality), torch.randn(1, 11, 12)
    visual = torch.arange(11)[None] % 3 == 1
    x[visual] *= 20
    with modality.rows(visual):
        wanted = linear(x)
    order = visual_first(visual)
    modality.set(take(visual, order), int(visual.sum()))
    monkeypatch.setattr(
        "duotone.weights.modules.quant_linear.linear_by_slices",
        lambda *given: slices.append(given[2]) or linear_by_slices(*given),
    )
    assert torch.equal(take(linear(take(x, order)), inverse(order)), wanted)
    assert slices == [4]
    with modality.rows(~visual):
        assert not torch.equal(linear(x), wanted)


def test_slices_that_are_none_are_refused():
    problem = random_problem(3, 9, 64, 8)
    for first in (-1, 4):
        with pytest.raises(ValueError, match=rf"within 0\.\.3; got scales .* first={first}"):
            by_slices(problem, first)
    with pytest.raises(ValueError, match="slices need scales"):
        linear_by_slices(problem.x_q, SCALES[:1], 1, problem.weight)
    for wrong in (torch.empty(3, 8), torch.empty(3, 9).half(), torch.empty(9, 3).T):
        with pytest.raises(ValueError, match="out must be"):
            linear_int(*problem.arguments, dtype=torch.float32, out=wrong.to(DEVICE))
