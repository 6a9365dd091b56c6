"""Steps before a quantized product: activation, transform, padding, split, int8 codes.

    x -> activation(x) * up -> online Hadamard, zero padding -> [float channel 0] + codes

Kernels do as much of it in one launch as they can (`one_launch`). On a CPU, and with
impl="reference", the steps run one by one in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.equivalences.hadamard import HadamardPlan, base_at, transform
from duotone.weights.modules.online_hadamard import hadamard, hadamard_quantize
from duotone.weights.modules.quantize_rows import activated_rows, quantize, takes_kernels


class Coded(NamedTuple):
    """The int8 input of a product.

    codes: [rows, columns]. scale: float32, the divisor of the features: [rows] or [1].
    x0: float32 [rows], channel 0 where it is split off (its codes are 0). dtype: of the result.
    """

    codes: Tensor
    scale: Tensor
    x0: Tensor | None
    dtype: torch.dtype


def features(
    x: Tensor,
    plan: HadamardPlan | None,
    columns: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """x [..., in] -> [rows, columns]: the weight's other factor, fp32 after a transform.

    columns: at least the features; zeros are appended. impl: "auto" (a kernel where there is one)
    or "reference".
    """
    rows = x.flatten(0, -2)
    if plan is not None:
        rows = _transformed(rows.float(), plan, impl)
    return _widened(rows, columns or rows.shape[1]).contiguous()


def encode(
    x: Tensor,
    scale: Tensor | None,
    columns: int,
    plan: HadamardPlan | None = None,
    split: bool = False,
    activation: str | None = None,
    up: Tensor | None = None,
    impl: str = "auto",
) -> Coded:
    """x [rows, in], rows may be strided, to codes [rows, columns].

    scale: static, float32 [rows] or [1]; None: a scale per row is found. activation, up [rows, in]:
    activation(x) * up is taken, rounded to x's type as the model rounds it (by kernels without a
    transform it is not rounded). split: channel 0 of the features stays floating point.
    """
    if one_launch(x, scale, plan, split, impl):
        return _in_one_launch(x, scale, columns, plan, split, activation, up, impl)
    plain = activation is None and up is None
    given = x if plain else activated_rows(x, activation, up, impl)
    rows, x0 = features(given, plan, columns, impl), None
    if split:
        x0, rows = rows[:, 0].float().contiguous(), rows.clone()
        rows[:, 0] = 0
    return Coded(*quantize(rows, scale, impl=impl), x0, x.dtype)


def one_launch(
    x: Tensor, scale: Tensor | None, plan: HadamardPlan | None, split: bool, impl: str
) -> bool:
    """True if one kernel does it all. Dynamic scales after blocks of a transform need a second."""
    possible = not split if plan is None else scale is not None
    return possible and takes_kernels(impl, x)


def _in_one_launch(
    x: Tensor,
    scale: Tensor | None,
    columns: int,
    plan: HadamardPlan | None,
    split: bool,
    activation: str | None,
    up: Tensor | None,
    impl: str,
) -> Coded:
    # Attention may return channels that are not contiguous.
    x = x if x.stride(1) == 1 else x.contiguous()
    given = {"activation": activation, "up": up, "impl": impl}
    if plan is None:
        found, x0 = quantize(x, scale, **given), None
    else:
        base = None if plan.base == 1 else base_at(plan.base, torch.int8, x.device)
        found, x0 = hadamard_quantize(x, scale, plan.blocks, base, plan.power, split=split, **given)
    return Coded(_widened(found.codes, columns), found.scale, x0, x.dtype)


def _transformed(x: Tensor, plan: HadamardPlan, impl: str) -> Tensor:
    if not takes_kernels(impl, x):
        return transform(x, plan)
    base = None if plan.base == 1 else base_at(plan.base, torch.int8, x.device)
    x = _widened(x, plan.padded).contiguous()
    return hadamard(x, plan.blocks, base, plan.power, impl)


def _widened(rows: Tensor, columns: int) -> Tensor:
    """Append zeros after the last channel."""
    missing = columns - rows.shape[1]
    return F.pad(rows, (0, missing)) if missing else rows
