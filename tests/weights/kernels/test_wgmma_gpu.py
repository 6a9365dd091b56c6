"""Warpgroup products on a real GPU: exact in every kind of tile, on odd shapes, in graphs."""

import pytest
import torch

from duotone.weights.kernels.cuda.wgmma_gemm import gemm_wgmma, missing
from duotone.weights.kernels.cuda.wgmma_tiles import WgmmaTile
from duotone.weights.modules.linear import choose, linear_int

from linear_cases import by_int_mm, random_problem

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing(DEVICE) is not None, reason=str(missing(DEVICE))),
]
KINDS = [
    WgmmaTile(16, 1),
    WgmmaTile(112, 2),
    WgmmaTile(256, 2),
    WgmmaTile(192, 3),
    WgmmaTile(160, 2, 2),
    WgmmaTile(240, 2, 1, sub_blocks=2),
    WgmmaTile(160, 2, 2, sub_blocks=2),
    WgmmaTile(112, 2, 3, sub_blocks=2),
]
# tokens, outs, ins: one tile with tokens missing; more tiles than blocks, the last ones overlapping
SHAPES = [(7, 256, 1040), (477, 28672, 512), (1999, 4600, 4304)]


def product(tile: WgmmaTile, problem, dtype: torch.dtype) -> torch.Tensor:
    x, scale, weight, x0, bias = problem.arguments
    out = torch.full((len(x), len(weight.codes)), float("nan"), dtype=dtype, device=x.device)
    return gemm_wgmma(x, scale, weight.codes, weight, x0, bias, out, tile)


def wanted(problem, dtype: torch.dtype) -> torch.Tensor:
    if len(problem.x_q) > 16:
        return by_int_mm(*problem.arguments, dtype=dtype)
    return linear_int(*problem.arguments, impl="reference", dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", KINDS, ids=str)
def test_every_kind_of_tile_is_exact(tile: WgmmaTile, shape: tuple[int, int, int]) -> None:
    for dtype, split in ((torch.bfloat16, False), (torch.float32, True)):
        problem = random_problem(*shape, 8, split=split, bias=split)
        for _ in range(3):
            found = product(tile, problem, dtype)
            torch.testing.assert_close(found, wanted(problem, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [2, 63, 100, 153, 310, 1000])
def test_auto_takes_it_and_is_exact(tokens: int) -> None:
    problem = random_problem(tokens, 4096, 4096, 8)
    assert choose(tokens, problem.weight, True) == "w8a8-wgmma"
    out = torch.full((tokens, 4096), float("nan"), dtype=torch.float16, device=DEVICE)
    found = linear_int(*problem.arguments, dtype=torch.float16, out=out)
    assert found is out
    torch.testing.assert_close(found, wanted(problem, torch.float16), rtol=0, atol=0)
