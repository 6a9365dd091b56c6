"""Gate and up in one launch on a real GPU: every kind of tile, odd shapes, graphs, MLPs."""

import pytest
import torch
from torch import Tensor

from duotone.weights.kernels.cuda.wgmma_gated import gated_wgmma
from duotone.weights.kernels.cuda.wgmma_gemm import missing
from duotone.weights.kernels.cuda.wgmma_tiles import WgmmaTile
from duotone.weights.modules.gated import gated_product, gated_reference, pays
from duotone.weights.modules.quantize_rows import quantize

from gated_cases import MLP, Case, random_gate

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing(DEVICE) is not None, reason=str(missing(DEVICE))),
]
TILES = [
    WgmmaTile(tokens, 2, 2, sub_blocks) for tokens in (16, 80, 112, 160) for sub_blocks in (1, 2)
]
# tokens, channels, ins: tokens missing; more tiles than blocks; the last tiles overlap, whole bands
SHAPES = [(7, 128, 1040), (477, 14336, 512), (1999, 2312, 1072)]
# fp32: sigmoids of two approximations; gates up to some 12. 16 bit: roundings that fall apart.
RELATIVE_RMS, RELATIVE_MOST = 1e-6, 1e-5
ROUNDED_RMS, ROUNDED_APART = 3e-4, 2e-3
GUARD = 3


def assert_near(found: Tensor, case: Case) -> None:
    """As the reference has it before it rounds, and then apart by one rounding, seldom."""
    wanted = gated_reference(*case.arguments, torch.float32)
    assert torch.isfinite(found).all()
    error = found.double() - wanted.double()
    if found.dtype == torch.float32:
        assert error.norm() <= RELATIVE_RMS * wanted.double().norm()
        assert (error.abs() <= RELATIVE_MOST * wanted.abs() + 1e-9).all()
        return
    rounded = wanted.to(found.dtype)
    apart = found != rounded
    assert apart.float().mean() <= ROUNDED_APART
    assert (found.float() - rounded.float()).norm() <= ROUNDED_RMS * wanted.norm()
    ulp = torch.finfo(found.dtype).eps
    assert (error.abs() <= ulp * wanted.abs() + 1e-6).all()


def poisoned(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(memory with GUARD rows of NaN at either end, the rows between)."""
    shape = (len(case.x_q) + 2 * GUARD, case.gate.channels)
    memory = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    return memory, memory[GUARD:-GUARD]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kind_of_tile(tile: WgmmaTile, shape: tuple[int, int, int]) -> None:
    if tile.outs > 2 * shape[1]:
        pytest.skip("larger than the weights")
    for dtype, per_row in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, True)):
        case = random_gate(*shape, per_row=per_row, bias=torch.bfloat16 if per_row else None)
        memory, out = poisoned(case, dtype)
        found = gated_wgmma(*case.arguments, out, tile)
        assert_near(found, case)
        assert memory[:GUARD].isnan().all()
        assert memory[-GUARD:].isnan().all()


@pytest.mark.parametrize("tokens", [2, 3, 63, 100, 111, 150, 261, 477, 2048])
@pytest.mark.parametrize("apart", [True, False], ids=["two weights", "one"])
def test_auto_takes_it(tokens: int, apart: bool) -> None:
    case = random_gate(tokens, 3584, 2048, per_row=apart, apart=apart)
    assert pays(tokens, case.gate)
    _, out = poisoned(case, torch.bfloat16)
    assert gated_product(*case.arguments, out=out) is out
    assert_near(out, case)


def test_one_token_by_the_kernel_and_by_auto() -> None:
    case = random_gate(1, 1024, 512)
    assert not pays(1, case.gate)
    for impl in ("auto", "w8a8-wgmma"):
        assert_near(gated_product(*case.arguments, impl=impl, dtype=torch.float32), case)


@pytest.mark.parametrize("bias", [None, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "quick_gelu", "gelu_tanh"])
def test_activations_and_biases(activation: str, bias: torch.dtype | None) -> None:
    case = random_gate(111, 1024, 1024, bias=bias, activation=activation)
    found = gated_product(*case.arguments, impl="w8a8-wgmma", dtype=torch.float32)
    wanted = gated_reference(*case.arguments, torch.float32)
    error = found - wanted
    assert error.norm() <= RELATIVE_RMS * wanted.norm()
    # 1 + tanh of a large negative number is itself no better in the reference
    assert error.abs().max() <= RELATIVE_MOST * wanted.abs().max()
    assert_near(gated_product(*case.but(activation="silu").arguments), case.but(activation="silu"))


def test_gates_that_are_far_from_zero() -> None:
    case = random_gate(63, 512, 512)
    case = case.but(row_scale=case.row_scale * 100)
    found = gated_product(*case.arguments, impl="w8a8-wgmma", dtype=torch.float32)
    wanted = gated_reference(*case.arguments, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("tokens", [70, 477])
def test_a_graph_behind_and_ahead_of_other_launches(tokens: int) -> None:
    """Launches overlap: the one ahead writes codes, the one behind reads what it makes."""
    case = random_gate(tokens, 4096, 2048, per_row=False)
    x = torch.randn(tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
    scale = torch.full((1,), 4 / 127, device=DEVICE)

    def chain() -> list[tuple[Tensor, Tensor, Tensor]]:
        made = []
        for _ in range(6):
            codes = quantize(x, scale).codes
            y = gated_product(codes, *case.arguments[1:])
            made.append((codes, y, quantize(y, scale).codes))
        return made

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain()
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        for parts in made:
            for part in parts[1:]:
                part.fill_(float("nan") if part.is_floating_point() else 77)
        graph.replay()
        for codes, y, behind in made:
            torch.testing.assert_close(codes, quantize(x, scale).codes, rtol=0, atol=0)
            assert_near(y, case.but(x_q=codes))
            torch.testing.assert_close(behind, quantize(y, scale).codes, rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["two linears", "one"])
@pytest.mark.parametrize("unfused", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [3, 150])
@torch.no_grad()
def test_an_mlp(tokens: int, unfused: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = MLP(1024, 3584, packed, bias=True)
    fused = mlp.fused()
    x = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    assert fused._in_one(x) is not None
    found_y, seen = fused(x), []
    product = mlp.down.product
    monkeypatch.setattr(mlp.down, "product", lambda given: seen.append(given) or product(given))
    fused(x)
    linears = [child for name, child in mlp.named_children() if name != "act"]
    for linear in linears:
        linear.impl = unfused
    wanted_y = mlp(x)
    # The unfused model rounds gate, up and what they make to 16 bit: a code may be the next one.
    away = (seen[0].codes.int() - seen[1].codes.int()).abs()
    assert seen[0].codes.float().std() > 10
    assert away.max() <= 2
    assert away.float().mean() < 0.3
    assert (found_y.float() - wanted_y.float()).norm() <= 0.03 * wanted_y.float().norm()
