"""JSON-safe records of the modules that quantization puts into a model; empty modules from records.

A quantized model is its configuration's model with some modules replaced. A checkpoint lists the
replaced modules; its tensors fill the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from duotone.weights.equivalences.hadamard import HadamardPlan
from duotone.weights.equivalences.norms import LayerNorm, RMSNorm
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.modules.fused import Fused
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.quant_linear import QuantLinear

Record = dict[str, Any]
OURS = (QuantLinear, RotatedInput, RMSNorm, LayerNorm)


def changes(model: nn.Module, plain: nn.Module) -> dict[str, Record]:
    """{path: record} of all modules of `model` that differ from `plain`, outermost first.

    plain: the same model as its configuration makes it; its tensors may be on the meta device.
    """
    found: dict[str, Record] = {}
    for name, child in model.named_children():
        before = getattr(plain, name, None)
        child = child.original if isinstance(child, Fused) else child
        if _differs(child, before):
            found[name] = record_of(child, before)
        elif before is not None:
            inner = changes(child, before)
            found |= {f"{name}.{path}": record for path, record in inner.items()}
    return found


def _differs(module: nn.Module, before: nn.Module | None) -> bool:
    if isinstance(module, nn.Linear) and isinstance(before, nn.Linear):
        return (module.bias is None) != (before.bias is None) or module.weight.shape != (
            before.weight.shape
        )
    return isinstance(module, OURS) or type(module) is not type(before)


def record_of(module: nn.Module, before: nn.Module | None = None) -> Record:
    """Record for `made_of`. `before`: the replaced module, which may be kept inside.

    Errors: ValueError for a module of a kind that quantization does not make.
    """
    if isinstance(module, QuantLinear):
        return module.record()
    if isinstance(module, RotatedInput):
        inner = record_of(module.linear)
        return {"kind": "rotated", "linear": inner, "plan": asdict(module.plan)}
    if isinstance(module, RMSNorm):
        return {"kind": "rms", "eps": module.eps, **_sizes(module)}
    if isinstance(module, LayerNorm):
        return {"kind": "layer", "eps": module.eps}
    if isinstance(module, nn.Linear):
        outs, ins = module.weight.shape
        return {"kind": "linear", "in": ins, "out": outs, "bias": module.bias is not None}
    if isinstance(module, nn.Sequential):
        parts = [
            {"kind": "kept"} if type(part) is type(before) else record_of(part) for part in module
        ]
        return {"kind": "sequential", "parts": parts}
    raise ValueError(
        f"a quantized model has modules of kinds {[kind.__name__ for kind in OURS]}, linears and "
        f"sequences in place of its own, got {type(module).__name__}; undo other changes first"
    )


def _sizes(norm: RMSNorm) -> dict[str, int | None]:
    return {
        name: None if getattr(norm, name) is None else len(getattr(norm, name))
        for name in ("weight", "bias")
    }


def made_of(
    record: Mapping[str, Any],
    dtype: torch.dtype,
    modality: Modality,
    before: nn.Module | None = None,
) -> nn.Module:
    """An empty module of that record on the meta device; `before` as for `record_of`.

    Errors: ValueError for a kind that this version does not know.
    """
    with torch.device("meta"):
        return _made(record, dtype, modality, before)


def _made(
    record: Mapping[str, Any], dtype: torch.dtype, modality: Modality, before: nn.Module | None
) -> nn.Module:
    kind = record["kind"]
    if record.get("signs"):
        raise ValueError(
            "an online Hadamard has no random signs, got a record of the former recipe "
            "static-msq-signs; quantize the model again, e.g. by mquant-w4a8"
        )
    if kind == "kept":
        return before
    if kind == "quantized":
        return QuantLinear.from_record(record, dtype, modality)
    if kind == "linear":
        return nn.Linear(record["in"], record["out"], bias=record["bias"], dtype=dtype)
    if kind == "rotated":
        plan = HadamardPlan(**record["plan"])
        return RotatedInput(_made(record["linear"], dtype, modality, None), plan)
    if kind == "rms":
        given = {n: record[n] and torch.empty(record[n], dtype=dtype) for n in ("weight", "bias")}
        return RMSNorm(record["eps"], **given)
    if kind == "layer":
        return LayerNorm(record["eps"])
    if kind == "sequential":
        return nn.Sequential(*(_made(p, dtype, modality, before) for p in record["parts"]))
    raise ValueError(
        f"a module record must be of a known kind, got {kind!r}; was it written by a newer duotone?"
    )
