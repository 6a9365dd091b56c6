"""Activations to int8, one symmetric scale per row or tensor, fused with the operations before.

q = clamp(round_half_even(x / s), -127, 127). With `scale` the scales are static: [tokens] with one
of two values per row (MSQ), or a single one. Without, the same kernel finds each row's own maximum
/ 127. That is per-token dynamic quantization, the baseline. All arithmetic is fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.kernels.devices import has_kernels

ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "quick_gelu")


class Rows(NamedTuple):
    """codes: int8 [tokens, channels]. scale: the divisor of the rows: [tokens], [1] or []."""

    codes: Tensor
    scale: Tensor


def quantize(
    x: Tensor,
    scale: Tensor | None,
    *,
    activation: str | None = None,
    up: Tensor | None = None,
    impl: str = "auto",
) -> Rows:
    """Codes of activation(x) * up. x, up: [tokens, channels], rows may be strided.

    Errors: ValueError for shapes, dtypes, or an impl ("auto", "reference", "triton") that do not
    fit.
    """
    check_rows(x, scale, up, activation)
    if chosen_impl(impl, x) == "reference":
        return _coded(activate(x, activation, up), scale)
    from duotone.weights.kernels.triton.rows import rows_quantize

    codes, found, _ = rows_quantize(x, scale, up=up, activation=activation)
    return Rows(codes, found if scale is None else scale)


def norm_quantize(
    x: Tensor,
    scale: Tensor | None,
    *,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kind: str = "rms",
    impl: str = "auto",
) -> Rows:
    """Codes of RMSNorm(x) (kind="rms") or LayerNorm(x) ("layer"), times weight plus bias.

    x: [tokens, channels].
    """
    check_rows(x, scale, None, None)
    if kind not in ("rms", "layer"):
        raise ValueError(f"kind must be 'rms' or 'layer'; got {kind!r}")
    if chosen_impl(impl, x) == "reference":
        return _coded(normalized(x, eps, weight, bias, kind), scale)
    from duotone.weights.kernels.triton.rows import rows_quantize

    codes, found, _ = rows_quantize(x, scale, norm=kind, weight=weight, bias=bias, eps=eps)
    return Rows(codes, found if scale is None else scale)


def activate(x: Tensor, activation: str | None, up: Tensor | None = None) -> Tensor:
    """activation(x) * up in fp32: the reference."""
    y = x.float()
    if activation == "silu":
        y = F.silu(y)
    elif activation == "quick_gelu":
        y = y * torch.sigmoid(1.702 * y)
    elif activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if up is None else y * up.float()


def activated_rows(x: Tensor, activation: str | None, up: Tensor | None, impl: str) -> Tensor:
    """activation(x) * up in the dtype of x, rounded once. x, up: [tokens, channels]."""
    check_rows(x, None, up, activation)
    if chosen_impl(impl, x) == "reference":
        return activate(x, activation, up).to(x.dtype)
    from duotone.weights.kernels.triton.rows import rows_quantize

    return rows_quantize(x, None, up=up, activation=activation, quantize=False, dense=True)[2]


def normalized(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kind: str = "rms",
) -> Tensor:
    """The norm in fp32, not rounded between its steps: the reference."""
    y = x.float()
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * (1 / torch.sqrt(y.square().mean(-1, keepdim=True) + eps))
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def to_codes(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [tokens, channels] / scale, rounded half to even, within +-127, as int8."""
    return (values / scale.reshape(-1, 1)).round().clamp(-127, 127).to(torch.int8)


def _coded(values: Tensor, scale: Tensor | None) -> Rows:
    if scale is None:
        most = values.abs().amax(-1)
        scale = torch.where(most > 0, most / 127, 1.0)
    return Rows(to_codes(values, scale), scale)


def chosen_impl(impl: str, x: Tensor) -> str:
    """ "reference" or "triton"; "auto" takes kernels on a GPU. Errors: ValueError for others."""
    if impl not in ("auto", "reference", "triton"):
        raise ValueError(f"impl must be auto, reference or triton; got {impl!r}")
    if impl == "triton" and not has_kernels(x.device):
        raise ValueError("impl='triton' needs triton and a CUDA device (or TRITON_INTERPRET=1)")
    kernels = impl == "triton" or (impl == "auto" and x.is_cuda and has_kernels(x.device))
    return "triton" if kernels and x.numel() else "reference"


def takes_kernels(impl: str, x: Tensor) -> bool:
    """True if `chosen_impl` takes kernels."""
    return chosen_impl(impl, x) == "triton"


def check_rows(x: Tensor, scale: Tensor | None, up: Tensor | None, activation: str | None) -> None:
    """Raise ValueError for arguments that do not fit."""
    if x.dim() != 2 or not x.is_floating_point() or x.stride(1) != 1:
        raise ValueError(
            "x must be floating point [tokens, channels] with contiguous rows; got "
            f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}; call .contiguous()"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}; got {activation!r}")
    shapes = ((), (1,), x.shape[:1])
    if scale is not None and (
        scale.dtype != torch.float32 or scale.shape not in shapes or not scale.is_contiguous()
    ):
        raise ValueError(
            f"scale must be float32 [{len(x)}], [1] or []; got {scale.dtype} {tuple(scale.shape)}"
        )
    if up is not None and (up.shape != x.shape or up.stride(1) != 1):
        raise ValueError(
            f"up must be {tuple(x.shape)} with contiguous rows; got {tuple(up.shape)} with strides "
            f"{up.stride()}"
        )
