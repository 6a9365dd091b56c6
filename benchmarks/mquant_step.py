"""One decode step of Qwen2-VL-7B's language model with random weights: bf16, W8A8, W4A8.

Everything but the linears is the same in all: our fused norm kernels (a residual sum inside), one
kernel for rotary embedding and cache append, SDPA, lm_head in bf16. No model of a framework, whose
launches would hide the difference.
"""

# ruff: noqa: D103
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from duotone.weights.kernels.triton_rows import rows_quantize
from duotone.weights.linear import linear_int
from duotone.weights.online_hadamard import hadamard_quantize
from duotone.weights.packed_weight import PackedWeight
from duotone.weights.quantize_rows import norm_quantize, static_quantize

import mquant_cases as cases

ROPE_BASE = 1e6
Weight = Tensor | PackedWeight


@triton.jit
def _store_halves(pointer, first, second, D: tl.constexpr):
    tl.store(pointer, first.to(tl.bfloat16))
    tl.store(pointer + D // 2, second.to(tl.bfloat16))


@triton.jit
def rope_append_kernel(
    qkv, query, keys, values, position, length, Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr
):
    # one head per program: queries and keys are turned, keys and values stored at `position`
    i_head, i_token = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, D // 2)
    at = tl.load(position)
    angle = at.to(tl.float32) * tl.exp(o.to(tl.float32) * (-2.0 / D * 13.815510557964274))
    p_in = qkv + i_token * (Q + 2 * KV) * D + i_head * D
    first, second = tl.load(p_in + o).to(tl.float32), tl.load(p_in + D // 2 + o).to(tl.float32)
    if i_head < Q + KV:
        cos, sin = tl.cos(angle), tl.sin(angle)
        first, second = first * cos - second * sin, second * cos + first * sin
    o_cache = ((i_token * KV + (i_head - Q) % KV) * length + at) * D + o
    if i_head < Q:
        _store_halves(query + (i_token * Q + i_head) * D + o, first, second, D)
    elif i_head < Q + KV:
        _store_halves(keys + o_cache, first, second, D)
    else:
        _store_halves(values + o_cache, first, second, D)


class Step:
    """kind: "bf16", "w8a8" or "w4a8". batch: sequences; context: tokens in the cache."""

    def __init__(self, kind: str, batch: int = 1, context: int = 512) -> None:
        self.kind, self.batch, self.context = kind, batch, context
        self.layers = [
            {name: self._weight(outs, ins) for name, (outs, ins, _) in cases.LINEARS.items()}
            for _ in range(cases.LAYERS)
        ]
        shape = (2, cases.LAYERS, batch, cases.KV_HEADS, context, cases.HEAD_DIM)
        self.cache = torch.randn(shape, device=cases.DEVICE, dtype=torch.bfloat16)
        self.head = torch.randn(
            cases.VOCABULARY, cases.HIDDEN, device=cases.DEVICE, dtype=torch.bfloat16
        )
        self.scale = torch.full((1,), 4.5 / 127, device=cases.DEVICE)
        self.position = torch.full((1,), context - 1, device=cases.DEVICE, dtype=torch.int32)
        self.start = torch.randn(batch, cases.HIDDEN, device=cases.DEVICE, dtype=torch.bfloat16)

    @property
    def weight_bytes(self) -> int:
        """Of the layers and the head."""
        parts = [w for layer in self.layers for w in layer.values()]
        return sum(w.nbytes for w in parts) + self.head.nbytes

    def __call__(self) -> Tensor:
        """Logits of one step: [batch, vocabulary]."""
        stream = self.start.clone()
        branch = torch.zeros_like(stream)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, self._linear(layer["qkv"], self._norm(branch, stream)))
            branch = self._linear(layer["o"], self._plain(attended))
            gate_up = self._linear(layer["gate_up"], self._norm(branch, stream))
            branch = self._linear(layer["down"], self._gated(gate_up))
        last = rows_quantize(
            branch, None, norm="rms", residual=stream, eps=1e-6, quantize=False, dense=True
        )[2]
        return F.linear(last, self.head)

    def _weight(self, outs: int, ins: int) -> Weight:
        if self.kind == "bf16":
            return torch.randn(outs, ins, device=cases.DEVICE, dtype=torch.bfloat16) * ins**-0.5
        return cases.packed(outs, ins, {"w8a8": 8, "w4a8": 4}[self.kind])

    def _linear(self, weight: Weight, x: Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return F.linear(x, weight)
        return linear_int(x, self.scale, weight)

    def _norm(self, branch: Tensor, stream: Tensor) -> Tensor:
        if self.kind != "bf16":
            return norm_quantize(branch, self.scale, eps=1e-6, residual=stream).codes
        return rows_quantize(
            branch, None, norm="rms", residual=stream, eps=1e-6, quantize=False, dense=True
        )[2]

    def _plain(self, x: Tensor) -> Tensor:
        return x if self.kind == "bf16" else static_quantize(x, self.scale)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if self.kind == "bf16":
            return rows_quantize(gate, None, up=up, activation="silu", quantize=False, dense=True)[
                2
            ]
        return hadamard_quantize(
            gate, self.scale, cases.BLOCKS, None, cases.BLOCK, activation="silu", up=up
        )[0].codes

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        q, kv, d = cases.Q_HEADS, cases.KV_HEADS, cases.HEAD_DIM
        keys, values = self.cache[0, index], self.cache[1, index]
        query = torch.empty(self.batch, q, 1, d, device=cases.DEVICE, dtype=torch.bfloat16)
        rope_append_kernel[(q + 2 * kv, self.batch)](
            qkv, query, keys, values, self.position, self.context, Q=q, KV=kv, D=d, num_warps=1
        )
        # the q heads of one kv head as its queries
        grouped = query.view(self.batch, kv, q // kv, d)
        out = F.scaled_dot_product_attention(grouped, keys, values)
        return out.reshape(self.batch, q * d)


def steps() -> dict[str, Callable[[], Step]]:
    """Rows of the table."""
    return {
        f"{kind} batch {batch}": (lambda k=kind, b=batch: Step(k, b))
        for batch in (1, 16)
        for kind in ("bf16", "w8a8", "w4a8")
    }
