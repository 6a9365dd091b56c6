"""One decode step of Qwen2-VL-7B's language model with random weights: bf16, W8A8, W4A8.

Everything but the linears is the same in all: our fused norm kernels (a residual sum inside), one
kernel from rotary embedding to attention's output (mquant_attention), lm_head in bf16. No model of
a framework, whose launches would hide the difference. A layer is eight launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.kernels.triton.overlap import overlap_if
from duotone.weights.kernels.triton.rows import rows_quantize
from duotone.weights.modules.linear import linear_int
from duotone.weights.modules.online_hadamard import hadamard_quantize
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quantize_rows import norm_quantize

import mquant_cases as cases
from mquant_attention import attend, rope_table

Weight = Tensor | PackedWeight


class Step:
    """kind: "bf16", "w8a8" or "w4a8". batch: sequences; context: tokens in the cache.

    overlap: kernels may start before the one ahead has ended; ahead: and then fetch weights to L2.
    """

    def __init__(
        self,
        kind: str,
        batch: int = 1,
        context: int = 512,
        overlap: bool = True,
        ahead: bool = False,
    ) -> None:
        self.kind, self.batch, self.context = kind, batch, context
        self.overlap, self.ahead = overlap, ahead
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
        self.table = rope_table(context, cases.HEAD_DIM, cases.DEVICE)
        self.position = torch.full((1,), context - 1, device=cases.DEVICE, dtype=torch.int32)
        self.start = torch.randn(batch, cases.HIDDEN, device=cases.DEVICE, dtype=torch.bfloat16)

    @property
    def weight_bytes(self) -> int:
        """Of the layers and the head."""
        parts = [w for layer in self.layers for w in layer.values()]
        return sum(w.nbytes for w in parts) + self.head.nbytes

    def __call__(self) -> Tensor:
        """Logits of one step: [batch, vocabulary]."""
        with overlap_if(self.overlap, self.ahead):
            return self._run()

    def _run(self) -> Tensor:
        # by kernels: a kernel that overlaps follows kernels, not copies and fills
        stream, branch = self.start * 1, self.start * 0
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, self._linear(layer["qkv"], self._norm(branch, stream)))
            branch = self._linear(layer["o"], attended)
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

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if self.kind == "bf16":
            return rows_quantize(gate, None, up=up, activation="silu", quantize=False, dense=True)[
                2
            ]
        given = (self.scale, *cases.transform(gate.shape[1]))
        return hadamard_quantize(gate, *given, activation="silu", up=up)[0].codes

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        keys, values = self.cache[0, index], self.cache[1, index]
        scale = None if self.kind == "bf16" else self.scale
        return attend(qkv, keys, values, self.table, self.position, scale)


def steps() -> dict[str, Callable[[], Step]]:
    """Rows of the table."""
    made = {
        f"{kind} batch {batch}": (lambda k=kind, b=batch: Step(k, b))
        for batch in (1, 16)
        for kind in ("bf16", "w8a8", "w4a8")
    }
    return made | {
        "w4a8 batch 1, fetching": lambda: Step("w4a8", ahead=True),
        "w4a8 batch 1, no overlap": lambda: Step("w4a8", overlap=False),
    }
