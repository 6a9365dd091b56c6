"""Gate and up in one launch: the reference, when it is taken, what it may not skip."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from duotone.weights.equivalences.norms import RMSNorm
from duotone.weights.kernels.cuda import wgmma_gated, wgmma_gemm
from duotone.weights.modules import gated, linear
from duotone.weights.modules.fused import CodedNorm
from duotone.weights.modules.gate import Gate
from duotone.weights.modules.gated import KERNEL, gated_product, gated_reference, pays, unsupported
from duotone.weights.modules.linear import linear_int

from gated_cases import MLP, quantized, random_gate
from linear_cases import DEVICE, Problem, expected, random_weight

CHANNELS, INNER = 32, 64
MAPS = ctypes.c_ubyte * wgmma_gemm.MAP_BYTES


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The kernel's calls, as if there was a device for it; the reference answers them."""
    made: list[tuple] = []

    def run(*given):
        made.append(given)
        *given, out = given
        return out.copy_(gated_reference(*given, out.dtype))

    # linear_int's choice needs Triton
    monkeypatch.setattr(gated, "choose", lambda tokens, *_: KERNEL if tokens > 1 else "gemv")
    monkeypatch.setattr(wgmma_gemm, "missing", lambda device: None)
    monkeypatch.setattr(wgmma_gated, "gated_wgmma", run)
    return made


@pytest.mark.parametrize("bias", [None, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
def test_what_it_computes(activation, bias):
    case = random_gate(5, 24, 48, bias=bias, activation=activation)
    gate, up = (
        expected(Problem(case.x_q, case.row_scale, weight, None, own))
        for weight, own in case.gate.products
    )
    functions = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), None: abs}
    wanted = (gate if activation is None else functions[activation](gate)) * up
    found = gated_product(*case.arguments, impl="reference", dtype=torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    # rounded once
    sixteen = gated_product(*case.arguments, impl="reference")
    assert torch.equal(sixteen, found.bfloat16())


def test_halves_are_those_of_one_weight():
    case, both = random_gate(3, 64, 32), random_weight(128, 32, 8)
    given = {"impl": "reference", "dtype": torch.float32}
    sums = linear_int(case.x_q, case.row_scale, both, impl="reference", dtype=torch.float32)
    assert torch.equal(
        gated_product(case.x_q, case.row_scale, Gate.halves(both, None), **given),
        sums[:, :64] * sums[:, 64:],
    )


def test_it_writes_where_it_is_told():
    case = random_gate(3, 64, 32)
    out = torch.full((3, 64), float("nan"), device=DEVICE)
    assert gated_product(*case.arguments, impl="reference", dtype=torch.float32, out=out) is out
    assert torch.isfinite(out).all()
    with pytest.raises(ValueError, match="out must be"):
        gated_product(*case.arguments, impl="reference", out=out)


CASE = random_gate(4, 64, 32)
HALF = torch.zeros(64, dtype=torch.float16, device=DEVICE)
REFUSED = {
    "activation must be one of": CASE.but(activation="gelu"),
    "8 bits; got 4": CASE.but(up=random_weight(64, 32, 4)),
    "weights of 8 bits": CASE.but(gate=random_weight(64, 32, 4)),
    "split column": CASE.but(up=random_weight(64, 32, 8, split=True)),
    "biases of one type": CASE.but(gate_bias=HALF, up_bias=HALF.bfloat16()),
    "one type, or none": CASE.but(gate_bias=HALF),
    "64 at least": CASE.but(gate=random_weight(56, 32, 8), up=random_weight(56, 32, 8)),
    "groups of columns": CASE.but(up=random_weight(64, 32, 8, group=32)),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.usefixtures("calls")
def test_what_one_launch_cannot_do(words):
    gate = REFUSED[words].gate
    assert words in (unsupported(gate) or "")
    assert not pays(4, gate)
    assert unsupported(CASE.gate) is None


@pytest.mark.usefixtures("calls")
def test_it_pays_where_the_products_would_be_warpgroups(monkeypatch):
    pytest.importorskip("triton", reason="what products are is chosen among Triton's kernels, too")
    monkeypatch.setattr(gated, "choose", linear.choose)
    monkeypatch.setattr(gated, "has_kernels", lambda device: True)
    assert [tokens for tokens in (1, 2, 63, 8192) if pays(tokens, CASE.gate)] == [2, 63, 8192]
    monkeypatch.setattr(gated, "has_kernels", lambda device: False)
    assert not pays(63, CASE.gate)


def test_auto_takes_the_kernel_where_it_pays(calls):
    found = gated_product(*CASE.arguments)
    assert len(calls) == 1
    assert torch.equal(found, gated_product(*CASE.arguments, impl="reference"))
    for case in (
        CASE.but(x_q=CASE.x_q[:1], row_scale=CASE.row_scale[:1]),
        CASE.but(activation="gelu"),
    ):
        gated_product(*case.arguments)
    gated_product(*CASE.but(x_q=CASE.x_q[:0], row_scale=CASE.row_scale[:0]).arguments)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "relu"}, "activation must be one of"),
        ({"up": random_weight(72, 32, 8)}, "must have one shape"),
        ({"row_scale": torch.ones(3, device=DEVICE)}, r"row_scale must be float32 \[4\]"),
        ({"x_q": CASE.x_q.float()}, "x_q must be int8"),
    ],
)
def test_arguments_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        gated_product(*CASE.but(**changes).arguments)


def test_an_impl_that_cannot_do_it_says_so():
    with pytest.raises(ValueError, match="impl must be one of"):
        gated_product(*CASE.arguments, impl="w8a8")
    with pytest.raises(ValueError, match="impl='w8a8-wgmma' cannot run this: activation must be"):
        gated_product(*CASE.but(activation="gelu").arguments, impl="w8a8-wgmma")


def test_what_the_launch_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(wgmma_gemm, "launch", lambda *given, **kinds: told.append((*given, kinds)))
    monkeypatch.setattr(wgmma_gemm, "_tensor_map", lambda codes, rows: MAPS(codes.data_ptr() % 251))
    case = random_gate(40, 144, 32, bias=torch.float16, activation="gelu_tanh")
    out = torch.empty(40, 144, dtype=torch.bfloat16, device=DEVICE)
    wgmma_gated.gated_wgmma(*case.arguments, out)
    ((tile, given, x_q, kinds),) = told
    gate = case.gate
    assert x_q is case.x_q
    addresses = {
        "y": out, "row_scale": case.row_scale, "out_scale": gate.gate.scale,
        "up_scale": gate.up.scale, "bias": gate.gate_bias, "up_bias": gate.up_bias,
    }  # fmt: skip
    assert {name: getattr(given, name) for name in addresses} == {
        name: tensor.data_ptr() for name, tensor in addresses.items()
    }
    for name, codes in (("w", gate.gate.codes), ("up", gate.up.codes), ("x", case.x_q)):
        assert getattr(given, name)[0] == codes.data_ptr() % 251
    assert (given.outs, given.x0, given.w0, given.factor) == (144, None, None, 1.0)
    # Each tile has as many outs of up as of gate.
    assert given.tiles_o == -(-144 // (tile.outs // 2))
    macros = wgmma_gemm.macros_of(tile, **kinds)
    assert (macros["GATED"], macros["ROWS"], macros["BIAS"], macros["PER_ROW"]) == (3, 2, 0, 1)


def states(tokens: int = 6) -> torch.Tensor:
    return torch.randn(2, tokens // 2, CHANNELS, device=DEVICE)


SHAPES = {"two": False, "one for both": True}


@pytest.mark.parametrize("packed", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_an_mlp_takes_it(calls, packed, bias):
    mlp, x = MLP(CHANNELS, INNER, packed, bias), states()
    found = mlp.fused()(x)
    assert len(calls) == 1
    assert calls[0][2].gate.shape == (INNER, CHANNELS)
    # fp32 is not rounded between its steps: the same numbers
    torch.testing.assert_close(found, mlp(x), rtol=0, atol=1e-6)


@torch.no_grad()
def test_codes_that_were_handed_over_are_taken_from_both(calls):
    mlp, x = MLP(CHANNELS, INNER), states()
    norm = RMSNorm(1e-6, torch.ones(CHANNELS)).to(DEVICE)
    coded = CodedNorm(norm, (mlp.first, mlp.second), "rms", 1e-6)
    found = mlp.fused()(coded(x))
    assert len(calls) == 1
    assert mlp.first.handed is mlp.second.handed is None
    torch.testing.assert_close(found, mlp(norm(x)), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="which nobody handed over"):
        mlp.fused()(torch.zeros(2, 3, CHANNELS, dtype=torch.int8, device=DEVICE))


def _listened(mlp):
    mlp.second.register_forward_hook(lambda *_: None)


def _reference(mlp):
    mlp.down.impl = "reference"


def _other_scale(mlp):
    mlp.second = quantized(INNER, CHANNELS, 0.01)


def _no_codes(mlp):
    mlp.second = nn.Linear(CHANNELS, INNER, device=DEVICE)


def _exact_gelu(mlp):
    mlp.act = nn.GELU()


@pytest.mark.parametrize(
    "change",
    [_listened, _reference, _other_scale, _no_codes, _exact_gelu],
    ids=lambda f: f.__name__,
)
@torch.no_grad()
def test_what_an_mlp_does_as_before(calls, change):
    mlp, x = MLP(CHANNELS, INNER), states()
    change(mlp)
    found = mlp.fused()(x)
    assert calls == []
    torch.testing.assert_close(found, mlp(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_reference_computes_what_it_did_bit_by_bit(dtype):
    mlp, x = MLP(CHANNELS, INNER), states().to(dtype)
    for one in (mlp.first, mlp.second, mlp.down):
        one.impl = "reference"
    assert torch.equal(mlp.fused()(x), mlp(x))
