"""The online Hadamard by its definition and by the kernel in the interpreter."""

import math

import pytest
import torch

from duotone.weights.equivalences.hadamard_bases import sylvester
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.online_hadamard import hadamard, hadamard_quantize, hadamard_reference

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


# tokens, blocks, m, p, channels that are stored; both ways where a base is wide enough for either
BASES = {
    "one tile": (3, 2, 12, 32, 768),
    "padded, p of 16": (2, 1, 28, 16, 441),
    "p below a product's least": (2, 3, 20, 4, 240),
    "folded powers": (2, 1, 4, 512, 2048),
    "two tiles, odd": (2, 1, 68, 64, 4304),
    "three tiles": (1, 1, 148, 16, 2368),
    "four tiles": (1, 1, 244, 16, 3904),
}


def random_signs(m: int) -> torch.Tensor:
    return (torch.randint(0, 2, (m, m)) * 2 - 1).to(torch.int8).to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("warps", [None, 4, 8], ids=["few", "four warps", "eight warps"])
@pytest.mark.parametrize("size", BASES.values(), ids=BASES)
def test_all_ways_of_a_base(size: tuple, warps: int | None) -> None:
    from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows
    from duotone.weights.kernels.triton.hadamard_base import BaseConfig

    tokens, blocks, m, p, channels = size
    torch.manual_seed(0)
    base, n = random_signs(m), blocks * m * p
    # strided rows, scales by row
    x, up = torch.randn(tokens, 2 * channels + 7, device=DEVICE).half()[:, 7:].chunk(2, 1)
    scale = torch.linspace(0.02, 0.04, tokens, device=DEVICE)
    config = HadamardConfig(0, BaseConfig(warps)) if warps else HadamardConfig(tokens * blocks)
    given = {"up": up, "activation": "silu", "split": True}
    wanted, wanted_x0 = hadamard_quantize(x, scale, blocks, base, p, impl="reference", **given)
    codes, x0 = hadamard_rows(x, blocks, base, p, scale=scale, config=config, **given)
    assert codes.shape == (tokens, n)
    torch.testing.assert_close(x0, wanted_x0, rtol=2e-3, atol=2e-3)
    away = (codes.int() - wanted.codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 1e-2


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 4e-3)],
    ids=["fp32", "fp16", "bf16"],
)
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_dense_transform_is_rounded_once(
    dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 12 * 16, device=DEVICE).to(dtype)
    base = SIGNS.to(torch.int8).to(DEVICE)
    found = hadamard(x, 1, base, 16, "triton").double()
    wanted = hadamard_reference(x.double(), 1, base, 16)
    assert (found - wanted).norm() < tolerance * wanted.norm()


@needs_kernels
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("p", [8192, 16384])
def test_large_powers_of_two_are_folded_into_a_base_of_one(p: int, few: bool) -> None:
    from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows

    channels, columns = torch.tensor([0, 1, 77, 128, p // 2 + 5, p - 1]), torch.arange(p)
    x = torch.zeros(len(channels), p, dtype=torch.float16, device=DEVICE)
    x[torch.arange(len(channels)), channels] = 1
    scale = torch.full((1,), 0.01 / math.sqrt(p), device=DEVICE)
    config = HadamardConfig(few_units=len(channels) if few else 0)
    codes, _ = hadamard_rows(x, 1, None, p, scale=scale, config=config)
    shared = channels[:, None] & columns
    ones = sum((shared >> bit) & 1 for bit in range(p.bit_length()))
    assert torch.equal(codes.cpu().long(), 100 * (1 - 2 * (ones % 2)))


@needs_kernels
def test_values_far_beyond_the_scale_saturate() -> None:
    """Sums of codes' units outgrow fp16: their codes stay at the ends, with the right sign."""
    from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows

    x = torch.zeros(1, 12 * 16, device=DEVICE, dtype=torch.float16)
    x[0, 5] = 6e4
    given = {"scale": torch.full((1,), 1e-3, device=DEVICE), "config": HadamardConfig(few_units=0)}
    base = SIGNS.to(torch.int8).to(DEVICE)
    codes, _ = hadamard_rows(x, 1, base, 16, **given)
    wanted = hadamard_reference(x.double(), 1, base, 16).sign() * 127
    assert torch.equal(codes.double(), wanted)


@needs_kernels
def test_a_base_without_a_kernel_takes_the_reference() -> None:
    base, x = random_signs(260), torch.randn(2, 1040, device=DEVICE)
    assert torch.equal(hadamard(x, 1, base, 4, "triton"), hadamard(x, 1, base, 4, "reference"))


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
