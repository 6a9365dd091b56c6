"""The online Hadamard by its definition and by the kernel in the interpreter."""

import math

import pytest
import torch

from duotone.weights.hadamard_bases import sylvester
from duotone.weights.kernels.availability import has_kernels
from duotone.weights.online_hadamard import hadamard, hadamard_quantize, hadamard_reference

from linear_cases import DEVICE

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")
# Any matrix of +-1 tells whether it is used.
SIGNS = torch.randint(0, 2, (12, 12), generator=torch.Generator().manual_seed(3)) * 2 - 1


def test_the_reference_is_the_kronecker_product() -> None:
    x = torch.randn(2, 2 * 12 * 4, dtype=torch.float64)
    matrix = torch.kron(SIGNS.double(), sylvester(4)) / math.sqrt(48)
    wanted = torch.cat([x[:, i : i + 48] @ matrix.T for i in (0, 48)], 1)
    torch.testing.assert_close(hadamard(x, 2, SIGNS, 4, "reference"), wanted)
    assert not torch.allclose(hadamard(x, 2, SIGNS.T.contiguous(), 4, "reference"), wanted)


def test_the_reference_keeps_its_precision_under_autocast() -> None:
    x = torch.randn(3, 96, device=DEVICE)
    wanted = hadamard_reference(x, 2, SIGNS.to(DEVICE), 4)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(hadamard_reference(x, 2, SIGNS.to(DEVICE), 4), wanted)


@needs_kernels
@pytest.mark.parametrize(
    ("blocks", "m", "p"), [(3, 1, 256), (2, 12, 32), (3, 1, 4), (1, 12, 128), (2, 4, 512)]
)
def test_the_kernel(blocks: int, m: int, p: int) -> None:
    base = None if m == 1 else SIGNS.to(torch.int8).to(DEVICE)
    gate, up = torch.randn(2, 2 * blocks * m * p, device=DEVICE).chunk(2, 1)
    scale = torch.tensor([0.03], device=DEVICE)
    results = [
        hadamard_quantize(
            gate, scale, blocks, base, p, activation="silu", up=up, split=True, impl=impl
        )
        for impl in ("triton", "reference")
    ]
    (found, x0), (wanted, wanted_x0) = results
    torch.testing.assert_close(x0, wanted_x0, rtol=1e-3, atol=1e-3)
    away = (found.codes.int() - wanted.codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 2e-2
    assert not found.codes[:, 0].any()


def test_clear_refusals() -> None:
    x = torch.randn(2, 48)
    with pytest.raises(ValueError, match="power of two"):
        hadamard(x, 1, None, 48)
    with pytest.raises(ValueError, match="larger transform"):
        hadamard(x, 1, None, 32)
    with pytest.raises(ValueError, match="pad with zeros"):
        hadamard(x, 1, None, 64)
    with pytest.raises(ValueError, match="square"):
        hadamard(x, 1, SIGNS[:6], 4)
