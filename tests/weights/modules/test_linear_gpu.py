"""The linear kernels on a real GPU: exact on odd shapes, under graphs, for strided inputs.

With groups of scales fp32 sums are exact or within the tolerance that linear_int documents.
"""

import pytest
import torch

from duotone.weights.modules.linear import (
    IMPLEMENTATIONS,
    choose,
    linear_float,
    linear_int,
    unsupported,
)
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quant_linear import QuantLinear
from duotone.weights.modules.slices import linear_by_slices

from linear_cases import assert_grouped_close, by_int_mm, expected, random_problem, random_weight

pytest.importorskip("triton", reason="the kernels need triton")

pytestmark = pytest.mark.gpu

KERNELS = IMPLEMENTATIONS[2:]
SHAPES = [
    (1, 4608, 3584),
    (2, 100, 18944),
    (7, 1152, 4304),
    (16, 3584, 13696),
    (17, 100, 13696),
    (63, 1152, 18944),
    (100, 4608, 3584),
    (300, 1152, 4304),
    (1000, 3584, 3584),
    (1, 96, 3420),
    (9, 104, 3420),
]
# tokens, outs, ins, columns of a group
GROUPED_SHAPES = [
    *((tokens, *size, 128) for tokens in (1, 7, 63, 300) for size in ((1160, 4352), (99, 18944))),
    *((tokens, 1160, 4352, group) for tokens in (1, 16, 100) for group in (32, 64, 256)),
]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    "shape",
    # tiles are left behind whole rounds; there are fewer than multiprocessors
    [(2048, 4608, 3584), (1999, 4600, 1040), (70, 4096, 14336), (310, 4096, 4096), (17, 104, 1040)],
    ids=str,
)
def test_parts_of_tiles_add_up_exactly(shape: tuple, parts: int) -> None:
    from duotone.weights.kernels.triton.gemm import GemmConfig, gemm_w8a8

    config = GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2, parts=parts)
    for _ in range(3):
        problem = random_problem(*shape, 8, split=True, bias=True)
        x, scale, weight, *rest = problem.arguments
        y = gemm_w8a8(x, scale, weight.codes, weight, *rest, torch.float32, config)
        wanted = by_int_mm(*problem.arguments, dtype=torch.float32)
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("bits", "impl"), [(8, "w8a8"), (4, "w4a8-scratch")])
@pytest.mark.parametrize("shape", [(2048, 4608, 3584), (1999, 4648, 1040), (1024, 4608, 512)])
def test_a_product_in_two_pieces_is_exact(shape: tuple, bits: int, impl: str) -> None:
    from duotone.weights.kernels.configs import gemm_pieces

    problem = random_problem(*shape, bits, split=True, bias=True)
    assert len(gemm_pieces(len(problem.x_q), problem.weight)) == 2
    y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
    x, scale, weight, *rest = problem.arguments
    plain = PackedWeight(weight.unpacked(), 8, weight.scale, None, weight.w0)
    wanted = by_int_mm(x, scale, plain, *rest, dtype=torch.float32)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [8, 70, 128])
@pytest.mark.parametrize("impl", ["w8a8", "w8a8-split", "w8a8-wgmma"])
def test_layers_of_a_graph_share_sums_and_counters(impl: str, tokens: int) -> None:
    """Launches overlap, and each finds the counters of the one before it at zero."""
    problems = [random_problem(tokens, 1024, ins, 8) for ins in (4096, 1040, 4096)]
    run = lambda: [  # noqa: E731
        linear_int(*p.arguments, impl=impl, dtype=torch.float32) for p in problems
    ]
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        for y in found:
            y.zero_()
        graph.replay()
        for y, problem in zip(found, problems, strict=True):
            torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bits", "split", "bias"), [(4, False, True), (8, True, False), (4, True, True)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(shape: tuple, bits: int, split: bool, bias: bool) -> None:
    torch.manual_seed(sum(shape))
    problem = random_problem(*shape, bits, split=split, bias=bias)
    wanted, ran = expected(problem), 0
    for impl in KERNELS:
        if unsupported(impl, shape[0], problem.weight, True) is None:
            for dtype in (torch.float32, torch.bfloat16):
                y = linear_int(*problem.arguments, impl=impl, dtype=dtype)
                torch.testing.assert_close(y, wanted.to(dtype), rtol=0, atol=0, msg=impl)
            ran += 1
    assert ran


@pytest.mark.parametrize(("bits", "split", "bias"), [(4, True, True), (8, False, False)])
@pytest.mark.parametrize("shape", GROUPED_SHAPES, ids=str)
def test_groups(shape: tuple, bits: int, split: bool, bias: bool) -> None:
    torch.manual_seed(sum(shape))
    *sizes, group = shape
    problem, ran = random_problem(*sizes, bits, group=group, split=split, bias=bias), 0
    wanted = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    for impl in KERNELS:
        if unsupported(impl, shape[0], problem.weight, True) is None:
            y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
            exact = impl in ("w8a8", "w4a8-scratch") and group <= 128
            assert_grouped_close(y, wanted, exact)
            ran += 1
    assert ran >= 2


@pytest.mark.parametrize("activation", ["static", "dynamic"])
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_a_layer_with_groups_takes_kernels(tokens: int, activation: str) -> None:
    weight = random_weight(1160, 4352, 4, group=128)
    scales = torch.tensor([0.03], device="cuda") if activation == "static" else None
    layer = QuantLinear(weight, activation=activation, scales=scales)
    assert choose(tokens, weight, True) != "reference"
    x = torch.randn(tokens, 4352, device="cuda")
    coded, found = layer.encode(x), layer(x)
    wanted = linear_int(coded.codes, coded.scale, weight, impl="reference", dtype=x.dtype)
    assert_grouped_close(found, wanted, False)


@pytest.mark.parametrize(
    ("impl", "group"),
    [(i, None) for i in KERNELS] + [(i, 128) for i in KERNELS if i != "w8a8-wgmma"],
)
def test_under_a_graph_and_again(impl: str, group: int | None) -> None:
    bits = 4 if impl.startswith("w4") else 8
    problem = random_problem(1 if impl == "gemv" else 40, 1152, 4096, bits, group=group)
    given = {"impl": impl, "dtype": torch.float32}
    # The very kernel: a new one cannot be loaded while a graph is captured.
    linear_int(*problem.arguments, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_int(*problem.arguments, **given)
    for _ in range(3):
        problem.x_q.copy_(torch.randint_like(problem.x_q, -127, 128))
        graph.replay()
        assert_grouped_close(y, expected(problem), group is None)


@pytest.mark.parametrize("first", [0, 1, 37, 299, 300])
@pytest.mark.parametrize(("bits", "outs"), [(4, 1152), (8, 1152), (4, 101), (8, 101)])
def test_two_slices_are_a_scale_per_row(bits: int, outs: int, first: int) -> None:
    problem = random_problem(300, outs, 4304, bits, split=bits == 4, bias=True)
    scales = torch.tensor([0.031, 0.7], device="cuda")
    problem.row_scale = scales[(torch.arange(300, device="cuda") < first).long()]
    for dtype in (torch.float32, torch.bfloat16):
        y = linear_by_slices(problem.x_q, scales, first, *problem.arguments[2:], dtype=dtype)
        assert torch.equal(y, linear_int(*problem.arguments, dtype=dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_strided_codes_of_x(bits: int) -> None:
    problem = random_problem(33, 128, 512, bits)
    wanted = linear_int(*problem.arguments, impl="reference")
    wide = torch.zeros(33, 1024, dtype=torch.int8, device="cuda")
    wide[:, ::2] = problem.x_q
    problem.x_q = wide[:, ::2]
    assert torch.equal(linear_int(*problem.arguments), wanted)


@pytest.mark.parametrize("tokens", [1, 5, 16, 63, 200])
@pytest.mark.parametrize("group", [None, 128, 64])
def test_16_bit_activations(tokens: int, group: int | None) -> None:
    weight = random_weight(1160, 4224, 4, group=group)
    x = torch.randn(tokens, 4224, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1160, device="cuda", dtype=torch.bfloat16)
    wanted = linear_float(x, weight, bias, "reference").float()
    for impl in ("split", "scratch"):
        y = linear_float(x, weight, bias, impl).float()
        assert (y - wanted).norm() / wanted.norm() < 5e-3, impl
        again = linear_float(x, weight, bias, impl).float()
        assert torch.equal(y, again), impl
