"""Products by every implementation, exact, at tiny odd sizes in the interpreter."""

import pytest
import torch

from duotone.weights import linear as door
from duotone.weights.kernels.availability import has_kernels
from duotone.weights.linear import IMPLEMENTATIONS, linear_float, linear_int, unsupported

from linear_cases import DEVICE, expected, random_problem, random_weight

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32])
def test_the_reference_is_exact(bits: int, group: int | None) -> None:
    problem = random_problem(7, 9, 1200, bits, split=True, bias=True)
    y = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)
    problem.weight.scale.mul_(2)
    y2 = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    assert not torch.equal(y, y2)
    if group is not None:
        weight = random_weight(9, 1216, bits, group=group)
        x = torch.randint(-127, 128, (3, 1216), dtype=torch.int8, device=DEVICE)
        y = linear_int(x, torch.ones(1, device=DEVICE), weight, dtype=torch.float32)
        torch.testing.assert_close(y, x.float() @ weight.dequantized().T, rtol=1e-5, atol=1e-3)


def test_the_reference_is_exact_under_autocast() -> None:
    problem = random_problem(3, 9, 600, 8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert (problem.x_q.float() @ problem.weight.codes.float().T).dtype == torch.bfloat16
        y = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "impl"), [(1, "gemv"), (3, "w4a8-fused"), (3, "w8a8-split"), (19, "w8a8")]
)
def test_kernels_are_exact(tokens: int, impl: str) -> None:
    for bits in (4, 8):
        problem = random_problem(tokens, 20, 1104, bits, split=bits == 4, bias=True)
        if unsupported(impl, tokens, problem.weight, True) is None:
            y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
            torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLEMENTATIONS[2:])
@pytest.mark.parametrize("tokens", [1, 19, 40])
def test_all_kernels_are_exact(impl: str, tokens: int) -> None:
    for bits in (4, 8):
        for split, bias in ((True, False), (False, True)):
            problem = random_problem(tokens, 136, 1104, bits, split=split, bias=bias)
            if unsupported(impl, tokens, problem.weight, True) is None:
                y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
                torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
def test_16_bit_activations() -> None:
    weight = random_weight(20, 256, 4, group=64)
    x = torch.randn(3, 256, device=DEVICE).bfloat16()
    wanted = linear_float(x, weight, impl="reference").float()
    y = linear_float(x, weight, impl="split").float()
    assert (y - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run natively")
def test_auto_leaves_the_interpreter_to_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_RUN", {})
    monkeypatch.setattr(door, "_float_split", None)
    problem = random_problem(1, 20, 1104, 4)
    y = linear_int(*problem.arguments, dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)
    weight, x = random_weight(20, 256, 4, group=64), torch.randn(3, 256).bfloat16()
    assert torch.equal(linear_float(x, weight), linear_float(x, weight, impl="reference"))
    if has_kernels(DEVICE):
        with pytest.raises(KeyError):
            linear_int(*problem.arguments, impl="gemv")


def test_clear_refusals() -> None:
    problem = random_problem(2, 9, 64, 4)
    x, scale, weight = problem.arguments[:3]
    with pytest.raises(ValueError, match="int8"):
        linear_int(x.float(), scale, weight)
    with pytest.raises(ValueError, match="row_scale"):
        linear_int(x, scale[:1].expand(5), weight)
    with pytest.raises(ValueError, match="belong together"):
        linear_int(x, scale, weight, x0=torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="8 bits"):
        linear_int(x, scale, weight, impl="w8a8-split")
    with pytest.raises(ValueError, match="impl must be"):
        linear_int(x, scale, weight, impl="fast")
