"""Random linears of Qwen2-VL-7B's language model, and what precedes each, in 16 bit and in codes.

Weights and activations are Gaussian, as a GPU's clock under load depends on the numbers it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.equivalences.hadamard import base_at, plan_hadamard
from duotone.weights.kernels.triton.hadamard import hadamard_rows
from duotone.weights.kernels.triton.rows import rows_quantize
from duotone.weights.modules.linear import linear_float, linear_int
from duotone.weights.modules.online_hadamard import hadamard_quantize
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quantize_rows import norm_quantize, quantize
from duotone.weights.modules.slices import linear_by_slices

from .random_model import random_weight

# A CPU only runs tests of this file.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INTERMEDIATE = 3584, 18944
Q_HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
# (out, in) of each linear, and what makes its input.
LINEARS = {
    "qkv": ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, "norm"),
    "o": (HIDDEN, HIDDEN, "plain"),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, "norm"),
    "down": (HIDDEN, INTERMEDIATE, "gate"),
}
# Of Qwen2-VL's vision tower: no gate before it.
FC2 = {"fc2": (1280, 5120, "quick_gelu")}
EPSILON = 1e-6


def shape_of(name: str) -> tuple[int, int, str]:
    """(out, in, what makes the input) of a linear of either stack."""
    return (LINEARS | FC2)[name]


@cache
def transform(channels: int) -> tuple[int, Tensor | None, int]:
    """(blocks, base, power) of the Hadamard transform that `duotone quantize` puts there."""
    plan = plan_hadamard(channels)
    base = None if plan.base == 1 else base_at(plan.base, torch.int8, DEVICE)
    return plan.blocks, base, plan.power


@dataclass
class Linear:
    """One linear at one number of tokens; buffers are made when first asked for."""

    outs: int
    ins: int
    before: str
    tokens: int

    @cached_property
    def x(self) -> Tensor:
        """Input before the norm, the gate or nothing: bf16."""
        width = 2 * self.ins if self.before == "gate" else self.ins
        return torch.randn(self.tokens, width, device=DEVICE, dtype=torch.bfloat16)

    @cached_property
    def dense(self) -> Tensor:
        """bf16 weight."""
        drawn = torch.randn(self.outs, self.ins, device=DEVICE, dtype=torch.bfloat16)
        return drawn * self.ins**-0.5

    @cached_property
    def w8(self) -> PackedWeight:
        """8 bits."""
        return random_weight(self.outs, self.ins, 8, None, DEVICE)

    @cached_property
    def w4(self) -> PackedWeight:
        """4 bits."""
        return random_weight(self.outs, self.ins, 4, None, DEVICE)

    @cached_property
    def w4_groups(self) -> PackedWeight:
        """4 bits in groups of 128."""
        return random_weight(self.outs, self.ins, 4, None, DEVICE, group=128)

    @cached_property
    def input(self) -> Tensor:
        """bf16 input of the product."""
        return torch.randn(self.tokens, self.ins, device=DEVICE, dtype=torch.bfloat16)

    @cached_property
    def codes(self) -> Tensor:
        """int8 input of the product."""
        return quantize(self.input, self.scalar).codes

    @cached_property
    def scalar(self) -> Tensor:
        """One static scale."""
        return torch.full((1,), 4.5 / 127, device=DEVICE)

    @cached_property
    def rows(self) -> Tensor:
        """MSQ: a scale per row, one of two, the first half visual."""
        scale = self.scales[1].repeat(self.tokens)
        scale[self.tokens // 2 :] = self.scales[0]
        return scale

    @cached_property
    def scales(self) -> Tensor:
        """MSQ's two: of text, of visual tokens."""
        return torch.tensor([0.5, 1.0], device=DEVICE) * 4.5 / 127

    def prepare_16(self) -> Tensor:
        """bf16: what the model computes before this product."""
        gate, up = self._halves()
        if self.before == "norm":
            return rows_quantize(self.x, None, norm="rms", eps=EPSILON, quantize=False, dense=True)[
                2
            ]
        if self.before == "gate":
            return rows_quantize(gate, None, up=up, activation="silu", quantize=False, dense=True)[
                2
            ]
        return self.x

    def prepare_static(self, scale: Tensor) -> Tensor:
        """Codes by static scales, all in one kernel."""
        if self.before == "norm":
            return norm_quantize(self.x, scale, eps=EPSILON).codes
        if self.before == "gate":
            gate, up = self._halves()
            given = (scale, *transform(self.ins))
            return hadamard_quantize(gate, *given, activation="silu", up=up)[0].codes
        return quantize(self.x, scale).codes

    def prepare_static_unfused(self, scale: Tensor) -> Tensor:
        """Codes by static scales, a kernel of its own."""
        return quantize(self._transformed(), scale).codes

    def prepare_dynamic(self) -> tuple[Tensor, Tensor]:
        """Codes by each row's maximum, in the kernel before; behind the Hadamard apart."""
        if self.before == "norm":
            return norm_quantize(self.x, None, eps=EPSILON)
        if self.before == "gate":
            return quantize(self._transformed(), None)
        return quantize(self.x, None)

    def prepare_dynamic_unfused(self) -> tuple[Tensor, Tensor]:
        """Codes by each row's maximum, a kernel of its own."""
        return quantize(self._transformed(), None)

    def before_codes(self) -> tuple[Tensor, dict[str, object]]:
        """(input of an activation and the online Hadamard, arguments beside it)."""
        if self.before != "gate":
            return self.x, {"scale": self.rows, "activation": self.before}
        gate, up = self._halves()
        return gate, {"scale": self.rows, "activation": "silu", "up": up}

    def by_halves(self, codes: Tensor) -> Tensor:
        """AIFS at 4 bits: visual rows first, a product with one scale for each, one result."""
        return linear_by_slices(codes, self.scales, self.tokens // 2, self.w4)

    def _transformed(self) -> Tensor:
        if self.before != "gate":
            return self.prepare_16()
        gate, up = self._halves()
        return hadamard_rows(gate, *transform(self.ins), activation="silu", up=up)[0]

    def _halves(self) -> tuple[Tensor, Tensor]:
        return self.x[:, : self.ins], self.x[:, -self.ins :]


Row = Callable[[Linear], object]
PREFILL: dict[str, Row] = {
    "bf16": lambda c: F.linear(c.input, c.dense),
    "w8a8": lambda c: linear_int(c.codes, c.rows, c.w8),
    "w8a8 triton": lambda c: linear_int(c.codes, c.rows, c.w8, impl="w8a8"),
    "w4a8 scratch": lambda c: linear_int(c.codes, c.rows, c.w4, impl="w4a8-scratch"),
    "w4a8 fused": lambda c: linear_int(c.codes, c.rows, c.w4, impl="w4a8-fused"),
    "w4a8 g128": lambda c: linear_int(c.codes, c.rows, c.w4_groups, impl="w4a8-scratch"),
}
# With what makes the input: does static still win over dynamic when both are fused?
CHAINS: dict[str, Row] = {
    "chain bf16": lambda c: F.linear(c.prepare_16(), c.dense),
    "chain static MSQ rows": lambda c: linear_int(c.prepare_static(c.rows), c.rows, c.w8),
    "chain w4a8 static MSQ rows": lambda c: linear_int(c.prepare_static(c.rows), c.rows, c.w4),
    "chain w4a8 static AIFS": lambda c: c.by_halves(c.prepare_static(c.rows)),
    "chain static unfused": lambda c: linear_int(c.prepare_static_unfused(c.rows), c.rows, c.w8),
    "chain dynamic fused": lambda c: linear_int(*c.prepare_dynamic(), c.w8),
    "chain dynamic unfused": lambda c: linear_int(*c.prepare_dynamic_unfused(), c.w8),
}
DECODE: dict[str, Row] = {
    "bf16": lambda c: F.linear(c.input, c.dense),
    "w8a8": lambda c: linear_int(c.codes, c.rows, c.w8),
    "w4a8": lambda c: linear_int(c.codes, c.rows, c.w4),
    "w4a8 g128": lambda c: linear_int(c.codes, c.rows, c.w4_groups),
    "w4a16 g128": lambda c: linear_float(c.input, c.w4_groups),
}
