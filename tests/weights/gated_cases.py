"""Random gates of quantized MLPs, of the size that activations have."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.modules.fused import FusedMLP, activation_kind
from duotone.weights.modules.gate import Gate
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.quant_linear import QuantLinear

from linear_cases import DEVICE, random_weight

# Sums of 4,096 products of random codes, times a scale of `random_weight`.
_SPREAD = 4096**0.5 * 73**2 * 0.006
MODALITY = Modality()


@dataclass
class Case:
    """Arguments of gated_product."""

    x_q: Tensor
    row_scale: Tensor
    gate: Gate

    @property
    def arguments(self) -> tuple:
        return self.x_q, self.row_scale, self.gate

    def but(self, **changes) -> "Case":
        """Changes by names of these, or of the gate's."""
        own = {f.name for f in fields(self)} - {"gate"}
        gate = {name: value for name, value in changes.items() if name not in own}
        rest = {name: value for name, value in changes.items() if name in own}
        return replace(self, gate=replace(self.gate, **gate), **rest)


def random_gate(
    tokens: int,
    channels: int,
    ins: int,
    *,
    bias: torch.dtype | None = None,
    per_row: bool = True,
    apart: bool = True,
    activation: str | None = "silu",
) -> Case:
    """Gates and ups spread by about 2; apart: two weights, else views of one."""
    x_q = torch.randint(-127, 128, (tokens, ins), dtype=torch.int8).to(DEVICE)
    most = 2 / _SPREAD * (4096 / ins) ** 0.5
    scales = torch.where(torch.rand(tokens) < 0.5, most, most / 3) if per_row else torch.ones(1)
    both = random_weight(2 * channels, ins, 8)
    offset = None if bias is None else torch.randn(2 * channels).to(DEVICE, bias)
    gate = Gate.halves(both, activation, offset)
    if apart:
        up = replace(gate.up, codes=gate.up.codes.clone(), scale=gate.up.scale.clone())
        gate = replace(gate, up=up)
    row_scale = (scales if per_row else most * scales).to(DEVICE)
    return Case(x_q, row_scale, gate)


def quantized(outs: int, ins: int, scale: float, *, bias: bool = False, plan=None) -> QuantLinear:
    """Static; outputs of about the variance of the inputs."""
    weight = random_weight(outs, ins if plan is None else plan.padded, 8)
    weight = replace(weight, scale=weight.scale * (2.3 / 127 / 0.006 * weight.shape[1] ** -0.5))
    return QuantLinear(
        weight,
        torch.randn(outs).to(DEVICE, torch.bfloat16) if bias else None,
        in_features=ins,
        scales=torch.tensor([scale], device=DEVICE),
        modality=MODALITY,
        plan=plan,
    )


class MLP(nn.Module):
    """packed: one linear makes gate and up."""

    def __init__(
        self, channels: int, inner: int, packed: bool = False, bias: bool = False, act=None
    ) -> None:
        super().__init__()
        self.packed = packed
        self.first = quantized(inner * (1 + packed), channels, 4.5 / 127, bias=bias)
        if not packed:
            self.second = quantized(inner, channels, 4.5 / 127, bias=bias)
        self.act = act or nn.SiLU()
        self.down = quantized(channels, inner, 3 / 127, plan=plan_hadamard(inner))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        gate, up = first.chunk(2, -1) if self.packed else (first, self.second(x))
        return self.down(self.act(gate) * up)

    def fused(self) -> FusedMLP:
        inputs = ("first",) if self.packed else ("first", "second")
        return FusedMLP(self, inputs, "down", "act", activation_kind(self.act), True)
