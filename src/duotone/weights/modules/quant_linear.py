"""The linear layer of a quantized model.

    x -> features: online Hadamard, zero padding -> [float channel 0] + int8 codes -> linear

The layer is rebuilt from a record (sizes and kinds, JSON-safe) and a state dict. A module before
the layer may make the codes and hand these over (`weights.modules.fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import HadamardPlan
from duotone.weights.modules.encode import Coded, encode, features
from duotone.weights.modules.linear import linear_float, linear_int
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.outside_graphs import outside_graphs
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.slices import linear_by_slices

Activation = Literal["static", "dynamic", "none"]
ACTIVATIONS = ("static", "dynamic", "none")


class QuantLinear(nn.Module):
    """A linear layer on integer codes.

    activation: "static" (int8, scales [text, visual] or [one]), "dynamic" (int8, a scale per token)
    or "none" (16 bit). With `weight.w0`, channel 0 of the features stays floating point and enters
    as a rank-1 term (RMS, MQuant 3.4).
    Errors: ValueError for scales that do not go with the activation.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None = None,
        *,
        in_features: int | None = None,
        activation: Activation = "static",
        scales: Tensor | None = None,
        modality: Modality | None = None,
        plan: HadamardPlan | None = None,
    ) -> None:
        outs, columns = weight.shape
        super().__init__()
        _check_activation(activation, scales)
        self.in_features = in_features or (columns if plan is None else plan.size)
        self.out_features, self.columns, self.plan = outs, columns, plan
        self.bits, self.group_size, self.activation = weight.bits, weight.group_size, activation
        self.modality = modality or Modality()
        self.impl = "auto"  # "reference": plain torch on any device, the same integers
        self.handed: Coded | None = None  # codes that a fused module left here for the next call
        for name in ("codes", "scale", "w0"):
            self.register_buffer(f"weight_{name}", getattr(weight, name))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @property
    def packed(self) -> PackedWeight:
        """The weight, a view of the buffers."""
        return PackedWeight(
            self.weight_codes, self.bits, self.weight_scale, self.group_size, self.weight_w0
        )

    @property
    def mode(self) -> str:
        """w4a8, w8a8, w4a16 or w8a16."""
        return f"w{self.bits}a{16 if self.activation == 'none' else 8}"

    def row_scale(self) -> Tensor | None:
        """float32 [rows] or [1] of the step that runs now; None where each row finds its own."""
        return None if self.scales is None else self.modality.row_scale(self.scales)

    def encode(self, x: Tensor, activation: str | None = None, up: Tensor | None = None) -> Coded:
        """The codes of activation(x) * up; x, up: [..., in], floating point."""
        rows, other = x.flatten(0, -2), None if up is None else up.flatten(0, -2)
        split = self.weight_w0 is not None
        given = (self.plan, split, activation, other, self.impl)
        return encode(rows, self.row_scale(), self.columns, *given)

    def coded(self, x: Tensor) -> Coded:
        """The codes of x [..., in]: made here, or for int8 x the codes that were handed over, once.

        Errors: ValueError for other integers.
        """
        return self.encode(x) if x.is_floating_point() else self._handed_over(x)

    def product(self, coded: Coded) -> Tensor:
        """Codes of this layer's input to [rows, out]."""
        x_q, scale, x0, dtype = coded
        given = (self.packed, x0, self.bias, self.impl, dtype)
        first = self.modality.first
        if first is not None and self._has_two_scales:
            return linear_by_slices(x_q, self.scales, first, *given)
        return linear_int(x_q, scale, *given)

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's type; int8 x must be the codes that were handed over.

        Errors: ValueError for other integers.
        """
        if self.activation == "none" and x.is_floating_point():
            rows = features(x, self.plan, self.columns, self.impl).to(x.dtype)
            y = linear_float(rows, self.packed, self.bias, self.impl)
        else:
            y = self.product(self.coded(x))
        return y.unflatten(0, x.shape[:-1])

    @property
    def _has_two_scales(self) -> bool:
        return self.scales is not None and len(self.scales) == 2

    def _handed_over(self, x: Tensor) -> Coded:
        coded, self.handed = self.handed, None
        if coded is None or x.dtype != torch.int8 or x.numel() != coded.codes.numel():
            raise ValueError(
                "a quantized linear takes floating point, or once the int8 codes that a fused "
                f"module before it made; got {x.dtype} {tuple(x.shape)}, which nobody handed "
                "over. Undo the fusion (duotone.hf.weights.fusion.unfuse) to call them one by one"
            )
        return coded._replace(codes=x.reshape(-1, self.columns))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        # model.to(bfloat16) must not take precision from scales, which are float32 by definition.
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if name in ("weight_scale", "scales") and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear shows them, and the quantization."""
        hadamard = "" if self.plan is None else f", hadamard={self.plan.block}"
        kind = f"{self.mode}, {self.activation}, split={self.weight_w0 is not None}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}{hadamard}"

    def record(self) -> dict[str, Any]:
        """JSON-safe record that `from_record` needs in addition to the state."""
        return {
            "kind": "quantized",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "columns": self.columns,
            "plan": None if self.plan is None else asdict(self.plan),
            "bias": self.bias is not None,
            "bits": self.bits,
            "group": self.group_size,
            "activation": self.activation,
            "scales": 0 if self.scales is None else len(self.scales),
            "split": self.weight_w0 is not None,
        }

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], dtype: torch.dtype, modality: Modality | None = None
    ) -> QuantLinear:
        """An empty layer of that record, in the current default device."""
        plan = None if record["plan"] is None else HadamardPlan(**record["plan"])
        bias = torch.empty(record["out_features"], dtype=dtype) if record["bias"] else None
        scales = torch.empty(record["scales"]) if record["scales"] else None
        return cls(
            _empty_weight(record, dtype),
            bias,
            in_features=record["in_features"],
            activation=record["activation"],
            scales=scales,
            modality=modality,
            plan=plan,
        )


def _check_activation(activation: str, scales: Tensor | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if (activation == "static") != (scales is not None):
        raise ValueError(
            f"static activations, and only they, have scales; got activation={activation!r} and "
            f"scales {None if scales is None else tuple(scales.shape)}"
        )
    if scales is not None and (scales.dtype != torch.float32 or scales.shape not in ((1,), (2,))):
        raise ValueError(
            "scales must be float32 [one] or [text, visual], got "
            f"{scales.dtype} {tuple(scales.shape)}"
        )


def _empty_weight(record: Mapping[str, Any], dtype: torch.dtype) -> PackedWeight:
    outs, columns, bits = record["out_features"], record["columns"], record["bits"]
    codes = torch.empty(outs, columns * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
    group = record["group"]
    scale = torch.empty((outs,) if group is None else (outs, columns // group))
    w0 = torch.empty(outs, dtype=dtype) if record["split"] else None
    return PackedWeight(codes, bits, scale, group, w0)
