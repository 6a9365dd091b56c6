"""Checks of the arguments of integer products, for every kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.weights.modules.packed_weight import PackedWeight

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def check_product(
    x_q: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError for arguments of an integer product that do not fit together."""
    rows, columns = weight.shape
    if x_q.dtype != torch.int8 or x_q.dim() != 2 or x_q.shape[1] != columns:
        raise ValueError(
            f"x_q must be int8 [tokens, {columns}]; got {x_q.dtype} {tuple(x_q.shape)}"
        )
    tokens = len(x_q)
    if row_scale.dtype != torch.float32 or tuple(row_scale.shape) not in ((), (1,), (tokens,)):
        raise ValueError(
            f"row_scale must be float32 [{tokens}], [1] or []; got {row_scale.dtype} "
            f"{tuple(row_scale.shape)}"
        )
    if not row_scale.is_contiguous():
        raise ValueError("row_scale must be contiguous; call .contiguous()")
    if (x0 is None) != (weight.w0 is None):
        raise ValueError(
            "x0 and the weight's split column w0 belong together; got only "
            + ("w0" if x0 is None else "x0")
        )
    for name, vector, length in (("x0", x0, tokens), ("bias", bias, rows)):
        if vector is not None and (tuple(vector.shape) != (length,) or not vector.is_contiguous()):
            raise ValueError(f"{name} must be [{length}], contiguous; got {tuple(vector.shape)}")
    if dtype not in OUTPUTS:
        raise ValueError(f"dtype must be one of {OUTPUTS}; got {dtype}")
    others = (row_scale, weight.codes, weight.scale, x0, bias, weight.w0)
    wrong = {str(t.device) for t in others if t is not None and t.device != x_q.device}
    if wrong:
        raise ValueError(f"everything must be on {x_q.device}, where x_q is; got {sorted(wrong)}")


def check_out(
    out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError for an `out` that the result cannot be written to."""
    if out is None:
        return
    found = (tuple(out.shape), out.dtype, out.device)
    if found != (shape, dtype, device) or not out.is_contiguous():
        raise ValueError(f"out must be {dtype} {shape} on {device}, contiguous; got {found}")
