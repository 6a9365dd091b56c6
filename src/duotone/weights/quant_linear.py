"""The linear layer of a quantized model.

    x -> features: signs, online Hadamard, zero padding -> [float channel 0] + int8 codes -> linear

It is rebuilt from a record (sizes and kinds, JSON-safe) and a state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.hadamard import HadamardPlan, base_at, transform
from duotone.weights.kernels.availability import has_kernels
from duotone.weights.linear import linear_float, linear_int
from duotone.weights.modality import Modality
from duotone.weights.online_hadamard import hadamard
from duotone.weights.packed_weight import PackedWeight
from duotone.weights.quantize_rows import Rows, quantize
from duotone.weights.slices import linear_by_slices

Activation = Literal["static", "dynamic", "none"]
ACTIVATIONS = ("static", "dynamic", "none")


def features(
    x: Tensor,
    plan: HadamardPlan | None,
    signs: Tensor | None,
    columns: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """x [..., in] -> [rows, columns]: what the weight is multiplied with, fp32 behind a transform.

    columns: more than there are: zeros are appended. impl: "auto" (a kernel where there is one) or
    "reference".
    """
    rows = x.flatten(0, -2)
    if plan is not None:
        rows = _transformed(rows.float(), plan, signs, impl)
    missing = (columns or rows.shape[1]) - rows.shape[1]
    return (F.pad(rows, (0, missing)) if missing else rows).contiguous()


def _transformed(x: Tensor, plan: HadamardPlan, signs: Tensor | None, impl: str) -> Tensor:
    if impl == "reference" or not (x.is_cuda and has_kernels(x.device)):
        return transform(x, plan, signs)
    x = x if signs is None else x * signs
    x = F.pad(x, (0, plan.padded - plan.size)).contiguous()
    base = None if plan.base == 1 else base_at(plan.base, torch.int8, x.device)
    return hadamard(x, plan.blocks, base, plan.power)


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
        signs: Tensor | None = None,
    ) -> None:
        outs, columns = weight.shape
        super().__init__()
        _check_activation(activation, scales)
        self.in_features = in_features or (columns if plan is None else plan.size)
        self.out_features, self.columns, self.plan = outs, columns, plan
        self.bits, self.group_size, self.activation = weight.bits, weight.group_size, activation
        self.modality = modality or Modality()
        self.impl = "auto"  # "reference": plain torch on any device, the same integers
        for name in ("codes", "scale", "w0"):
            self.register_buffer(f"weight_{name}", getattr(weight, name))
        self.register_buffer("signs", signs)
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

    def coded(self, rows: Tensor) -> tuple[Rows, Tensor | None]:
        """(int8 codes of features [rows, columns] with their scales, channel 0 if it is split)."""
        x0 = None
        if self.weight_w0 is not None:
            x0 = rows[:, 0].contiguous()
            rows = rows.clone()
            rows[:, 0] = 0
        scale = None
        if self.activation == "static":
            scale = self.modality.row_scale(self.scales)
        return quantize(rows, scale, impl=self.impl), x0

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's type."""
        rows = features(x, self.plan, self.signs, self.columns, self.impl)
        if self.activation == "none":
            y = linear_float(rows.to(x.dtype), self.packed, self.bias, self.impl)
        else:
            codes, x0 = self.coded(rows)
            y = self._product(codes, x0, x.dtype)
        return y.unflatten(0, x.shape[:-1])

    def _product(self, codes: Rows, x0: Tensor | None, dtype: torch.dtype) -> Tensor:
        rest, first = (self.packed, x0, self.bias, self.impl, dtype), self.modality.first
        if first is not None and self.activation == "static" and len(self.scales) == 2:
            return linear_by_slices(codes.codes, self.scales, first, *rest)
        return linear_int(codes.codes, codes.scale, *rest)

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
        """Sizes, as nn.Linear shows them, and what is quantized how."""
        turned = "" if self.plan is None else f", hadamard={self.plan.block}"
        kind = f"{self.mode}, {self.activation}, split={self.weight_w0 is not None}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}{turned}"

    def record(self) -> dict[str, Any]:
        """What `from_record` needs beside the state."""
        return {
            "kind": "quantized",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "columns": self.columns,
            "plan": None if self.plan is None else asdict(self.plan),
            "signs": self.signs is not None,
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
        signs = torch.empty(record["in_features"], dtype=dtype) if record["signs"] else None
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
            signs=signs,
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
