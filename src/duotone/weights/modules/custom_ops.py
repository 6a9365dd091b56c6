"""The kernels' doors as single operations of a compiled graph; in eager mode, the doors themselves.

A compiler would otherwise trace the code that chooses and launches a kernel: caches, shared memory,
launches that overlap. Eager calls bypass the operations, whose dispatch takes the host microseconds
each. Operations take tensors and numbers only, and may not return their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.weights.equivalences.hadamard import HadamardPlan
from duotone.weights.modules import encode as doors
from duotone.weights.modules import linear, quantize_rows
from duotone.weights.modules.encode import Coded
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quantize_rows import Rows

# codes, bits, scale, group_size and w0 of a PackedWeight.
WeightFields = tuple[Tensor, int, Tensor, int | None, Tensor | None]


def encode(
    x: Tensor,
    scale: Tensor | None,
    columns: int,
    plan: HadamardPlan | None,
    split: bool,
    activation: str | None,
    up: Tensor | None,
    impl: str,
) -> Coded:
    """`modules.encode.encode`."""
    rest = (split, activation, up, impl)
    if not torch.compiler.is_compiling():
        return doors.encode(x, scale, columns, plan, *rest)
    codes, found, x0 = _encode(x, scale, columns, _sizes(plan), *rest)
    return Coded(codes, found if scale is None else scale, x0 if split else None, x.dtype)


def norm_quantize(
    x: Tensor,
    scale: Tensor | None,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    impl: str,
) -> Rows:
    """`modules.quantize_rows.norm_quantize`."""
    if not torch.compiler.is_compiling():
        given = {"weight": weight, "bias": bias, "kind": kind, "impl": impl}
        return quantize_rows.norm_quantize(x, scale, eps=eps, **given)
    codes, found = _norm_quantize(x, scale, eps, weight, bias, kind, impl)
    return Rows(codes, found if scale is None else scale)


def linear_int(coded: Coded, weight: WeightFields, bias: Tensor | None, impl: str) -> Tensor:
    """`modules.linear.linear_int`."""
    x_q, row_scale, x0, dtype = coded
    if not torch.compiler.is_compiling():
        return linear.linear_int(x_q, row_scale, PackedWeight(*weight), x0, bias, impl, dtype)
    return _linear_int(x_q, row_scale, *weight, x0, bias, impl, dtype)


def linear_float(
    x: Tensor,
    plan: HadamardPlan | None,
    weight: WeightFields,
    bias: Tensor | None,
    impl: str,
) -> Tensor:
    """`modules.linear.linear_float` of the features of x [rows, in]."""
    run = _linear_float if torch.compiler.is_compiling() else _features_times_weight
    return run(x, _sizes(plan), *weight, bias, impl)


@torch.library.custom_op("duotone::encode", mutates_args=())
def _encode(
    x: Tensor,
    scale: Tensor | None,
    columns: int,
    plan: Sequence[int] | None,
    split: bool,
    activation: str | None,
    up: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales found, channel 0); empty where there are none."""
    made = doors.encode(x, scale, columns, _planned(plan), split, activation, up, impl)
    found = made.scale if scale is None else _nothing(x)
    return made.codes, found, made.x0 if split else _nothing(x)


@_encode.register_fake
def _(
    x: Tensor,
    scale: Tensor | None,
    columns: int,
    plan: Sequence[int] | None,
    split: bool,
    *_rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape[0], columns, dtype=torch.int8)
    found = _per_row(x) if scale is None else _nothing(x)
    return codes, found, _per_row(x) if split else _nothing(x)


@torch.library.custom_op("duotone::norm_quantize", mutates_args=())
def _norm_quantize(
    x: Tensor,
    scale: Tensor | None,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """(codes, scales found or nothing)."""
    given = {"weight": weight, "bias": bias, "kind": kind, "impl": impl}
    codes, found = quantize_rows.norm_quantize(x, scale, eps=eps, **given)
    return codes, found if scale is None else _nothing(x)


@_norm_quantize.register_fake
def _(x: Tensor, scale: Tensor | None, *_rest: object) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.int8)
    return codes, _per_row(x) if scale is None else _nothing(x)


@torch.library.custom_op("duotone::linear_int", mutates_args=())
def _linear_int(
    x_q: Tensor,
    row_scale: Tensor,
    codes: Tensor,
    bits: int,
    scale: Tensor,
    group_size: int | None,
    w0: Tensor | None,
    x0: Tensor | None,
    bias: Tensor | None,
    impl: str,
    dtype: torch.dtype,
) -> Tensor:
    weight = PackedWeight(codes, bits, scale, group_size, w0)
    return linear.linear_int(x_q, row_scale, weight, x0, bias, impl, dtype)


@_linear_int.register_fake
def _(x_q: Tensor, row_scale: Tensor, codes: Tensor, *rest: object) -> Tensor:
    return x_q.new_empty(x_q.shape[0], codes.shape[0], dtype=rest[-1])


def _features_times_weight(
    x: Tensor,
    plan: Sequence[int] | None,
    codes: Tensor,
    bits: int,
    scale: Tensor,
    group_size: int | None,
    w0: Tensor | None,
    bias: Tensor | None,
    impl: str,
) -> Tensor:
    weight = PackedWeight(codes, bits, scale, group_size, w0)
    rows = doors.features(x, _planned(plan), weight.shape[1], impl).to(x.dtype)
    return linear.linear_float(rows, weight, bias, impl)


_linear_float = torch.library.custom_op(
    "duotone::linear_float", _features_times_weight, mutates_args=()
)


@_linear_float.register_fake
def _(x: Tensor, plan: object, codes: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _sizes(plan: HadamardPlan | None) -> tuple[int, ...] | None:
    if plan is None:
        return None
    return plan.size, plan.padded, plan.blocks, plan.base, plan.power


def _planned(sizes: Sequence[int] | None) -> HadamardPlan | None:
    return None if sizes is None else HadamardPlan(*sizes)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)
