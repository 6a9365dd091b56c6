"""Quantization and Hadamard kernels on a real GPU against their references."""

import pytest
import torch

from duotone.weights.modules.online_hadamard import hadamard, hadamard_quantize
from duotone.weights.modules.quantize_rows import ACTIVATIONS, norm_quantize, quantize

pytest.importorskip("triton", reason="the kernels need triton")

from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows
from duotone.weights.kernels.triton.hadamard_base import BaseConfig
from duotone.weights.kernels.triton.hadamard_columns import ColumnsConfig

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# blocks, m, p of real sizes: 18944 twice, 14336, 11008, 19968 padded, 8960, 3584, 5120, 13696,
# 28672, 4096, 3456, 96, ...
SIZES = [
    (37, 1, 512),
    (1, 148, 128),
    (1, 28, 512),
    (1, 172, 64),
    (1, 156, 128),
    (1, 140, 64),
    (1, 28, 128),
    (1, 20, 256),
    (1, 108, 128),
    (1, 28, 1024),
    (2, 12, 16),
    (1, 36, 32),
    (3, 44, 4),
    (1, 52, 512),
    (1, 1, 4096),
    (1, 1, 8192),
    (27, 1, 128),
    (3, 1, 32),
    (269, 1, 16),
    (855, 1, 4),
]


def signs(m: int) -> torch.Tensor | None:
    """Any matrix of +-1 tells whether the kernel multiplies by it."""
    if m == 1:
        return None
    return torch.randint(0, 2, (m, m), device="cuda").mul(2).sub(1).to(torch.int8)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_static_codes_are_exact(dtype: torch.dtype, tokens: int) -> None:
    x = torch.randn(tokens, 3000, device="cuda", dtype=dtype)[:, 5:2901]
    scale = torch.rand(tokens, device="cuda") * 0.03 + 0.003
    for one in (scale, scale[:1], scale[0]):
        assert torch.equal(quantize(x, one).codes, quantize(x, one, impl="reference").codes)


@pytest.mark.parametrize("scale", [1e-20, 3e-4, 0.0354, 7.0, 1e20])
def test_codes_next_to_a_half_are_exact(scale: float) -> None:
    """A quotient that is off by one bit would fall to the other side."""
    s = torch.full((1,), scale, device="cuda")
    halves = (torch.arange(-140, 140, device="cuda").double() + 0.5) * s.double()
    x = torch.stack([halves.float().view(torch.int32) + i for i in range(-3, 4)])
    x = x.view(torch.float32)
    assert torch.equal(quantize(x, s).codes, quantize(x, s, impl="reference").codes)


def near(codes: torch.Tensor, wanted: torch.Tensor, share: float = 2e-3) -> None:
    """Off by one where a rounding before fell the other way: rarely."""
    away = (codes.int() - wanted.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < share


@pytest.mark.parametrize("columns", [3584, 18944, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gates(columns: int, activation: str | None, dynamic: bool) -> None:
    both = torch.randn(33, 2 * columns, device="cuda", dtype=BF16)
    gate, up = both.chunk(2, 1)
    scale = None if dynamic else torch.rand(33, device="cuda") * 0.03 + 0.01
    found = quantize(gate, scale, activation=activation, up=up)
    wanted = quantize(gate, scale, activation=activation, up=up, impl="reference")
    torch.testing.assert_close(found.scale, wanted.scale)
    near(found.codes, wanted.codes)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_norms(kind: str, dynamic: bool) -> None:
    x = torch.randn(65, 3584, device="cuda", dtype=BF16)
    weight = torch.rand(3584, device="cuda", dtype=BF16)
    scale = None if dynamic else torch.full((1,), 0.02, device="cuda")
    given = {"eps": 1e-6, "weight": weight, "bias": weight, "kind": kind}
    found = norm_quantize(x, scale, **given)
    wanted = norm_quantize(x, scale, impl="reference", **given)
    torch.testing.assert_close(found.scale, wanted.scale)
    near(found.codes, wanted.codes)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_hadamard(size: tuple, dtype: torch.dtype, tokens: int) -> None:
    blocks, m, p = size
    base, n = signs(m), blocks * m * p
    both = torch.randn(tokens, 2 * n, device="cuda", dtype=dtype)
    x, up = both.chunk(2, 1)
    y, wanted = (hadamard(x, blocks, base, p, impl) for impl in ("triton", "reference"))
    tolerance = 1e-5 if dtype == FP32 else 6e-3
    assert (y.float() - wanted.float()).norm() / wanted.float().norm() < tolerance
    scale = torch.full((1,), 0.03, device="cuda")
    fused = [
        hadamard_quantize(
            x, scale, blocks, base, p, activation="silu", up=up, split=True, impl=impl
        )
        for impl in ("triton", "reference")
    ]
    (found, x0), (rows, wanted_x0) = fused
    torch.testing.assert_close(x0.float(), wanted_x0.float(), rtol=1e-2, atol=1e-2)
    away = (found.codes.int() - rows.codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 2e-2


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("registers", [None, 168])
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("m", [20, 100, 148, 172, 244])
def test_every_configuration_gives_the_same(
    warps: int, registers: int | None, columns: int, m: int
) -> None:
    x = torch.randn(200, m * 128, device="cuda", dtype=BF16)
    base, scale = signs(m), torch.rand(200, device="cuda") * 0.03 + 0.02
    wanted, wanted_x0 = hadamard_quantize(x, scale, 1, base, 128, split=True, impl="reference")
    for few in (0, 200):
        config = HadamardConfig(few, BaseConfig(warps, registers), ColumnsConfig(columns, warps))
        codes, x0 = hadamard_rows(x, 1, base, 128, scale=scale, split=True, config=config)
        torch.testing.assert_close(x0, wanted_x0, rtol=1e-2, atol=1e-2)
        near(codes, wanted.codes, share=1e-2)


def test_a_captured_transform_gives_the_same() -> None:
    x, base = torch.randn(3, 148 * 128, device="cuda", dtype=BF16), signs(148)
    scale = torch.full((1,), 0.03, device="cuda")
    for tokens in (1, 3, 100):
        rows = x.repeat(34, 1)[:tokens]
        wanted = hadamard_rows(rows, 1, base, 128, scale=scale)[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            codes, _ = hadamard_rows(rows, 1, base, 128, scale=scale)
        codes.zero_()
        graph.replay()
        assert torch.equal(codes, wanted)


def test_values_far_beyond_the_scale_saturate() -> None:
    """Sums of codes' units outgrow fp16: their codes stay at the ends, with the right sign."""
    x, base = torch.zeros(1, 12 * 16, device="cuda", dtype=FP16), signs(12)
    x[0, 5] = 6e4
    scale = torch.full((1,), 1e-3, device="cuda")
    codes, _ = hadamard_rows(x, 1, base, 16, scale=scale, config=HadamardConfig(few_units=0))
    wanted = hadamard(x.double(), 1, base, 16, "reference").sign() * 127
    assert torch.equal(codes.double(), wanted)


@pytest.mark.parametrize("size", [(3420, 1, 108, 32), (4304, 1, 68, 64), (100, 1, 1, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 130])
def test_hadamard_of_padded_channels_with_signs(size: tuple, tokens: int) -> None:
    channels, blocks, m, p = size
    x = torch.randn(tokens, channels, device="cuda", dtype=BF16)
    flips = torch.randn(channels, device="cuda").sign().to(BF16).expand(tokens, -1)
    scale, base = torch.full((1,), 0.03, device="cuda"), signs(m)
    given = {"activation": "gelu_tanh", "up": flips, "split": True}
    (found, x0), (wanted, wanted_x0) = (
        hadamard_quantize(x, scale, blocks, base, p, impl=impl, **given)
        for impl in ("triton", "reference")
    )
    torch.testing.assert_close(x0, wanted_x0, rtol=1e-2, atol=1e-2)
    away = (found.codes.int() - wanted.codes.int()).abs()
    assert found.codes.shape == (tokens, blocks * m * p)
    assert away.max() <= 1
    assert away.float().mean() < 2e-2
