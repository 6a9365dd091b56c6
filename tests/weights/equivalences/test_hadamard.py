import pytest
import torch

from duotone.weights.equivalences.hadamard import (
    HadamardPlan,
    exact_plan,
    plan_hadamard,
    transform,
    transform_back,
)
from duotone.weights.equivalences.hadamard_bases import base_matrix, sylvester

# size -> (padded, blocks, base, power) of the MLPs of real models.
REAL = {
    11008: (11008, 1, 172, 64),
    14336: (14336, 1, 28, 512),
    18944: (18944, 1, 148, 128),
    13696: (13824, 1, 108, 128),
    4304: (4352, 1, 68, 64),
    3420: (3456, 1, 108, 32),
    8960: (8960, 1, 140, 64),
    3584: (3584, 1, 28, 128),
    5120: (5120, 1, 20, 256),
    29568: (29696, 1, 116, 256),
    4096: (4096, 1, 1, 4096),
    15360: (15360, 1, 60, 256),
}


def dense(plan):
    """The transform as a matrix [padded, padded]."""
    block = torch.kron(base_matrix(plan.base).double(), sylvester(plan.power).double())
    return torch.block_diag(*[block / plan.block**0.5] * plan.blocks)


def test_it_keeps_its_precision_under_autocast():
    plan = plan_hadamard(96)
    assert plan.base > 1
    x = torch.randn(3, 96)
    wanted = transform(x, plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform(x, plan), wanted)


@pytest.mark.parametrize("size", REAL)
def test_sizes_of_real_models(size):
    plan = plan_hadamard(size)
    assert (plan.padded, plan.blocks, plan.base, plan.power) == REAL[size]


@pytest.mark.parametrize("size", [1, 2, 7, 12, 56, 63, 96, 100, 111, 130, 148, 1184])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_dense_matrix_and_comes_back(size, padded):
    plan = plan_hadamard(size)
    if padded:
        plan = HadamardPlan(size, 2048, 2, 1, 1024)
    x = torch.randn(3, 2, size, dtype=torch.float64)
    y = transform(x, plan)
    wide = torch.nn.functional.pad(x, (0, plan.padded - size))
    torch.testing.assert_close(y, wide @ dense(plan).T, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform_back(y, plan), x, rtol=0, atol=1e-12)


def test_bfloat16_is_summed_in_float32():
    plan = plan_hadamard(11008)
    x = torch.randn(2, 11008).bfloat16()
    assert transform(x, plan).dtype == torch.bfloat16
    exact = transform(x.double(), plan)
    torch.testing.assert_close(transform(x, plan).double(), exact, rtol=2**-8, atol=1e-5)


def test_no_pad_prefers_exact_then_blocks():
    assert plan_hadamard(18944, pad=False).base == 148
    plan = plan_hadamard(13696, pad=False)
    assert (plan.blocks, plan.block, plan.padded) == (107, 128, 13696)
    assert exact_plan(13696) is None


@pytest.mark.parametrize(
    ("size", "pad", "match"),
    [(4304, False, "4304 = 269 \\* 16.*allow padding"), (0, True, "at least one channel")],
)
def test_what_does_not_fit_is_refused(size, pad, match):
    with pytest.raises(ValueError, match=match):
        plan_hadamard(size, pad)


def test_wrong_shapes_are_refused():
    plan = plan_hadamard(111)
    with pytest.raises(ValueError, match="111 channels"):
        transform(torch.zeros(2, 128), plan)
    with pytest.raises(ValueError, match="128 channels"):
        transform_back(torch.zeros(2, 111), plan)
    with pytest.raises(ValueError, match="padded = blocks"):
        HadamardPlan(100, 100, 1, 12, 8)
