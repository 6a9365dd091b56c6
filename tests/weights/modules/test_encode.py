"""From an activation to codes: the kernels' single launch against the steps one by one."""

import pytest
import torch
import torch.nn.functional as F

from duotone.weights.equivalences.hadamard import plan_hadamard, transform
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.encode import encode

from linear_cases import DEVICE

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")
SCALE = torch.tensor([0.03], device=DEVICE)
# Padded to 128, to 320 = 20 * 16, and to 64.
SIZES = (100, 300, 63)


def halves(size, rows=7):
    torch.manual_seed(size)
    return torch.randn(rows, 2 * size, device=DEVICE).chunk(2, 1)


def assert_near(found, wanted, share=2e-2):
    away = (found.codes.int() - wanted.codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < share
    torch.testing.assert_close(found.scale, wanted.scale)
    if wanted.x0 is None:
        assert found.x0 is None
    else:
        torch.testing.assert_close(found.x0, wanted.x0, rtol=1e-3, atol=1e-3)


def test_wrong_codes_are_not_near():
    right = encode(halves(48)[0], SCALE, 48, plan_hadamard(48), split=True, impl="reference")
    assert_near(right, right)
    for name, wrong in (
        ("codes", right.codes.neg()),
        ("codes", right.codes.roll(1, 0)),
        ("codes", right.codes.clamp(max=126) + 1),
        ("scale", right.scale * 1.1),
        ("x0", right.x0 + 0.1),
    ):
        with pytest.raises(AssertionError):
            assert_near(right._replace(**{name: wrong}), right)


@pytest.mark.parametrize("size", SIZES)
def test_the_reference_takes_the_steps_one_by_one(size):
    gate, up = halves(size)
    plan = plan_hadamard(size)
    found = encode(gate, SCALE, plan.padded + 2, plan, True, "silu", up, "reference")
    rows = F.pad(transform(F.silu(gate) * up, plan), (0, 2))
    assert torch.equal(found.x0, rows[:, 0])
    rows[:, 0] = 0
    assert torch.equal(found.codes.float(), (rows / SCALE).round().clamp(-127, 127))
    assert found.codes[:, 1:].any()


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [False, True])
def test_one_launch_behind_a_padded_transform(size, split):
    gate, up = halves(size)
    plan = plan_hadamard(size)
    given = (SCALE, plan.padded, plan, split, "gelu", up)
    assert_near(encode(gate, *given, "triton"), encode(gate, *given, "reference"))


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_launch_without_a_transform_and_with_padding(dynamic):
    gate, up = halves(63)
    scale = None if dynamic else SCALE
    given = (scale, 64, None, False, "silu", up)
    found = encode(gate, *given, "triton")
    assert_near(found, encode(gate, *given, "reference"), 5e-3)
    assert found.codes.shape == (7, 64)
    assert not found.codes[:, 63].any()


@needs_kernels
@pytest.mark.parametrize("split", [False, True])
def test_dynamic_scales_behind_a_transform(split):
    gate, up = halves(48)
    plan = plan_hadamard(48)
    given = (None, 48, plan, split, "silu", up)
    assert_near(encode(gate, *given, "triton"), encode(gate, *given, "reference"))


@needs_kernels
def test_channels_that_are_not_neighbours():
    x = halves(48)[0].T.contiguous().T
    given = (SCALE, 48, plan_hadamard(48))
    assert_near(encode(x, *given, impl="triton"), encode(x, *given, impl="reference"))
