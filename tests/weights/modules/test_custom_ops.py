"""Fused modules under torch.compile: one graph whose nodes are the kernels' doors."""

import pytest
import torch
from torch import nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.norms import RMSNorm
from duotone.weights.modules import custom_ops as opaque
from duotone.weights.modules.fused import CodedNorm, FusedMLP
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quant_linear import QuantLinear

CHANNELS = 20


def quantized(scale=0.03, outs=CHANNELS, split=False, **options):
    plan = options.get("plan")
    columns = CHANNELS if plan is None else plan.padded
    codes = torch.randint(-9, 9, (outs, columns), dtype=torch.int8)
    weight = PackedWeight(
        codes, 8, torch.rand(outs) / 99, None, torch.rand(outs) if split else None
    )
    scales = None if scale is None else torch.tensor([scale])
    kind = options.pop("activation", "dynamic" if scale is None else "static")
    given = {"in_features": CHANNELS, "activation": kind, "scales": scales}
    return QuantLinear(weight, torch.rand(outs), **given, **options)


class MLP(nn.Module):
    """gate, up -> act, transform, split -> down."""

    def __init__(self, scale):
        super().__init__()
        self.gate, self.up, self.act = quantized(scale), quantized(scale), nn.SiLU()
        self.down = quantized(scale, split=True, plan=plan_hadamard(CHANNELS))


class Block(nn.Module):
    """A fused norm and MLP, and a linear of 16-bit activations."""

    def __init__(self, scale):
        super().__init__()
        mlp = MLP(scale)
        norm = RMSNorm(1e-6, torch.rand(CHANNELS))
        self.norm = CodedNorm(norm, (mlp.gate, mlp.up), "rms", 1e-6)
        self.mlp = FusedMLP(mlp, ("gate", "up"), "down", "act", "silu", True)
        self.out = quantized(None, activation="none", plan=plan_hadamard(CHANNELS))

    def forward(self, x):
        return self.out(self.mlp(self.norm(x)))


def compiled_nodes(block):
    """(compiled block, list that the names of its operations come to stand in)."""
    names = []

    def backend(graph, _):
        names.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    return torch.compile(block, fullgraph=True, backend=backend, dynamic=True), names


@pytest.mark.parametrize("scale", [0.03, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("kernels", [False, True])
@torch.no_grad()
def test_a_block_is_one_graph(scale, kernels, monkeypatch):
    """kernels: what would run on a GPU, here by the kernels' references."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(scale)
    if kernels:
        for where in ("duotone.weights.modules.fused", "duotone.weights.modules.encode"):
            monkeypatch.setattr(f"{where}.takes_kernels", lambda impl, x: True)
    step, names = compiled_nodes(block)
    for tokens in (3, 5):
        x = torch.randn(2, tokens, CHANNELS)
        assert torch.equal(step(x), block(x))
    ours = [name.split(".")[1] for name in names if name.startswith("duotone")]
    first = "norm_quantize" if kernels else "encode"
    assert ours[:5] == [first, "linear_int", "linear_int", "encode", "linear_int"]
    assert ours[5] == "linear_float"


OPERATIONS = (
    opaque._encode,
    opaque._norm_quantize,
    opaque._linear_int,
    opaque._linear_float,
)


@pytest.mark.parametrize("scale", [torch.tensor([0.03]), None], ids=["static", "dynamic"])
def test_operations_say_what_they_return(scale):
    x, plan = torch.randn(3, CHANNELS), opaque._sizes(plan_hadamard(CHANNELS))
    codes = torch.randint(-9, 9, (4, CHANNELS), dtype=torch.int8)
    weight = (codes, 8, torch.rand(4), None, None)
    rows = torch.randint(-9, 9, (3, CHANNELS), dtype=torch.int8)
    calls = {
        "encode": (x, scale, CHANNELS, plan, True, "silu", x.clone(), "reference"),
        "norm": (x, scale, 1e-6, None, None, "layer", "reference"),
        "int": (rows, torch.ones(3), *weight, None, None, "reference", torch.bfloat16),
        "float": (x, plan, *weight, torch.rand(4), "reference"),
    }
    checks = ("test_schema", "test_faketensor")
    for operation, given in zip(OPERATIONS, calls.values(), strict=True):
        torch.library.opcheck(operation, given, test_utils=checks)
