"""One door to the linear kernels: check the arguments, choose by shape, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duotone.tools.slow_paths import SlowPaths
from duotone.weights.kernels.cuda import unpack_int4, wgmma_gemm
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.kernels.reference import linear_float_reference, linear_int_reference
from duotone.weights.kernels.scratch import LAUNCHES
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.product_checks import check_out, check_product

IMPLEMENTATIONS = (
    "auto",
    "reference",
    "gemv",
    "w4a8-fused",
    "w4a8-scratch",
    "w8a8-split",
    "w8a8",
    "w8a8-wgmma",
)
# Kernels for few tokens, and those that many tokens take unless sizes keep them from it.
_FOR_MANY = {"w4a8-fused": "w4a8-scratch", "w8a8-split": "w8a8"}
_BY_FEW = "runs by a kernel for few tokens, 10 times slower than a 16-bit product of many"
_BY_REFERENCE = "runs by PyTorch operations, many times slower than a 16-bit product"
_SLOW = SlowPaths()
_NO_KERNELS = "it needs triton and a CUDA device (or TRITON_INTERPRET=1); take impl='reference'"


def linear_int(
    x_q: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None = None,
    bias: Tensor | None = None,
    impl: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Integer activations times integer weights, scaled: W8A8 and W4A8.

    y = (x_q @ codes^T) * row_scale * weight.scale + x0 (x) weight.w0 + bias; the product is exact
    in int32. All else is fp32 in this order, so all implementations agree bit by bit.

    With groups: y = (sum over groups g of (x_q_g @ codes_g^T) * scale_g) * row_scale + ...; a
    group's product is exact in int32, then scaled and added in fp32. The reference adds in
    ascending order. So do "w8a8" and "w4a8-scratch" up to 128 columns per group, bit by bit. Other
    implementations split columns and add in another order, which is fixed for each. Before y is
    rounded to `dtype`, these sums differ from the reference by a relative RMS below 1e-6 on random
    data. Always, they differ by less than n * 2^-23 * the sum of the magnitudes of the n scaled
    products.

    x_q: int8 [tokens, in]. row_scale: float32 [tokens] (MSQ: one of two values per row), or [] or
    [1]. x0: [tokens], the channel that RMS keeps in floating point; required iff weight.w0 is
    given.
    bias: [out]. dtype: of the result. out: [tokens, out] of that dtype, contiguous, to write it to.
    impl: "reference" runs everywhere. All other names are kernels and need a CUDA device (or
        TRITON_INTERPRET=1). One token: "gemv". Few tokens: "w4a8-fused" and "w8a8-split", whose
        columns are split over programs. Many tokens: "w8a8", or "w8a8-wgmma" in CUDA for Hopper,
        with duotone[cuda]. "w4a8-scratch" unpacks, then runs one of these two. "auto" chooses by
        shape, on a CPU "reference".
    Returns [tokens, out].
    Errors: ValueError for arguments that do not fit, and for an `impl` that cannot do this.
    """
    check_product(x_q, row_scale, weight, x0, bias, dtype)
    tokens = x_q.shape[0]
    check_out(out, (tokens, weight.shape[0]), dtype, x_q.device)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}; got {impl!r}")
    chosen = choose(tokens, weight, _has_fast(x_q)) if impl == "auto" else impl
    if impl == "auto" and _on_gpu(x_q):
        say_slow(chosen, tokens, weight)
    reason = unsupported(chosen, tokens, weight, has_kernels(x_q.device))
    if reason is not None:
        raise ValueError(f"impl={chosen!r} cannot run this: {reason}")
    given = (row_scale, weight, x0, bias, dtype)
    if chosen == "reference" or not tokens:
        y = linear_int_reference(x_q, *given)
    elif chosen in _WRITES:
        return _RUN[chosen](x_q.contiguous(), *given, out=out)
    else:
        y = _RUN[chosen](x_q.contiguous(), *given)
    return y if out is None else out.copy_(y)


def linear_float(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """16-bit activations times dequantized weights: W4A16.

    x: [tokens, in], bfloat16 for the kernels. impl: "reference", "split" (few tokens, bfloat16,
    groups in powers of two from 32 on), "scratch" (dequantize, then the 16-bit product), "auto".
    Returns [tokens, out] in the dtype of x.
    Errors: ValueError for arguments that do not fit, and for an `impl` that cannot do this.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[1] or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point [tokens, {weight.shape[1]}]; got {x.dtype} {tuple(x.shape)}"
        )
    if impl not in ("auto", "reference", "split", "scratch"):
        raise ValueError(f"impl must be auto, reference, split or scratch; got {impl!r}")
    reason = _float_reason(x, weight)
    plain = impl == "auto" and (reason is not None or not _has_fast(x))
    if impl == "auto" and reason is not None and _on_gpu(x):
        _SLOW.say("a W4A16 linear", _BY_REFERENCE, reason)
    if impl == "reference" or plain or not len(x):
        return linear_float_reference(x, weight, bias)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run this: {reason}")
    from duotone.weights.kernels import configs

    x = x.contiguous()
    if impl == "split" or (impl == "auto" and len(x) <= configs.MAX_FLOAT_SPLIT_TOKENS):
        return _float_split(x, weight, bias)
    from duotone.weights.kernels.triton.scratch import dequantized

    with LAUNCHES:
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)


def _has_fast(x: Tensor) -> bool:
    """True if kernels run natively: "auto" never takes the interpreter, which is for tests."""
    return x.is_cuda and has_kernels(x.device)


def _on_gpu(x: Tensor) -> bool:
    """There are kernels for where `x` is; elsewhere the reference is what one expects."""
    return x.is_cuda


def say_slow(chosen: str, tokens: int, weight: PackedWeight) -> None:
    """Warn, once per process and cause, where sizes keep "auto" from what is fast."""
    what = f"a W{weight.bits}A8 linear"
    if chosen == "reference":
        _SLOW.say(what, _BY_REFERENCE, _group_reason(weight) or _NO_KERNELS)
    elif chosen in _FOR_MANY:
        reason = unsupported(_FOR_MANY[chosen], tokens, weight, kernels=True)
        if reason is not None and _are_many(tokens, weight.bits):
            _SLOW.say(what, _BY_FEW, reason)


def _are_many(tokens: int, bits: int) -> bool:
    from duotone.weights.kernels.configs import MAX_SPLIT_TOKENS

    return tokens > MAX_SPLIT_TOKENS[bits]


def choose(tokens: int, weight: PackedWeight, kernels: bool) -> str:
    """The implementation that is fastest for this shape of those that can run it."""
    if not kernels:
        return "reference"
    from duotone.weights.kernels.configs import preferred

    ways = preferred(tokens, weight.bits)
    return next((w for w in ways if unsupported(w, tokens, weight, kernels) is None), "reference")


def unsupported(impl: str, tokens: int, weight: PackedWeight, kernels: bool) -> str | None:
    """Reason why `impl` cannot run this shape, or None."""
    if impl == "reference":
        return None
    columns = weight.shape[1]
    if impl == "w8a8-wgmma" and weight.bits == 8:
        return wgmma_gemm.unsupported(weight) or wgmma_gemm.missing(weight.codes.device)
    if impl.startswith("w4a8") and weight.bits != 4:
        return f"it takes weights of 4 bits; got {weight.bits}"
    if impl.startswith("w8a8") and weight.bits != 8:
        return f"it takes weights of 8 bits; got {weight.bits}"
    if impl == "gemv" and (tokens != 1 or columns % (32 // weight.bits)):
        return f"it takes one token and columns in {32 // weight.bits}s; got {tokens}, {columns}"
    if impl in ("w8a8", "w4a8-scratch") and columns % 16:
        return f"TMA takes columns in sixteens; got {columns}"
    return _group_reason(weight) or (None if kernels else _NO_KERNELS)


def _group_reason(weight: PackedWeight) -> str | None:
    """Reason why no kernel takes groups of this size, or None."""
    size = weight.group_size
    if size is not None and (size < 32 or size & (size - 1)):
        return f"it takes groups in powers of two from 32 on; got {size}"
    return None


def _float_reason(x: Tensor, weight: PackedWeight) -> str | None:
    if x.dtype != torch.bfloat16 or weight.bits != 4:
        return f"it takes bfloat16 and 4 bits; got {x.dtype} and {weight.bits}"
    if weight.w0 is not None:
        return "16-bit activations need no split column; got a weight with w0"
    return _group_reason(weight) or (None if has_kernels(x.device) else _NO_KERNELS)


def _run_gemv(x_q: Tensor, *rest: Any) -> Tensor:
    from duotone.weights.kernels import configs
    from duotone.weights.kernels.triton.gemv import gemv

    return gemv(x_q, *rest, configs.gemv_config(rest[1]))


def _run_split(x_q: Tensor, *rest: Any) -> Tensor:
    from duotone.weights.kernels import configs
    from duotone.weights.kernels.triton.split import split_linear

    return split_linear(x_q, *rest, configs.split_config(len(x_q), rest[1]))


def _float_split(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    from duotone.weights.kernels import configs
    from duotone.weights.kernels.triton.split import split_linear

    config = configs.split_config(len(x), weight, floating=True)
    return split_linear(x, configs.one(x.device), weight, None, bias, x.dtype, config)


def _run_w8a8(
    x_q: Tensor, row_scale: Tensor, weight: PackedWeight, *rest: Any, **out: Any
) -> Tensor:
    return _tiled(_fill_by_triton, x_q, row_scale, weight.codes, weight, *rest, **out)


def _run_wgmma(
    x_q: Tensor, row_scale: Tensor, weight: PackedWeight, *rest: Any, **out: Any
) -> Tensor:
    return _tiled(wgmma_gemm.gemm_wgmma, x_q, row_scale, weight.codes, weight, *rest, **out)


def _run_scratch(
    x_q: Tensor, row_scale: Tensor, weight: PackedWeight, *rest: Any, **out: Any
) -> Tensor:
    from duotone.weights.kernels.triton.scratch import unpacked_times_16

    able = wgmma_gemm.unsupported(weight) is None and wgmma_gemm.missing(x_q.device) is None
    fill = wgmma_gemm.gemm_wgmma if able else _fill_by_triton
    has_kept = able and unpack_int4.takes(weight)
    unpack = unpack_int4.unpacked_times_16 if has_kept else unpacked_times_16
    with LAUNCHES:
        return _tiled(fill, x_q, row_scale, unpack(weight), weight, *rest, **out)


def _tiled(
    fill: Callable[..., object],
    x_q: Tensor,
    row_scale: Tensor,
    codes: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Product by tiles of int8 `codes`, maybe the weight's times 16; fill: writes the result."""
    if out is None:
        out = torch.empty(x_q.shape[0], codes.shape[0], dtype=dtype, device=x_q.device)
    fill(x_q, row_scale, codes, weight, x0, bias, out)
    return out


def _fill_by_triton(
    x_q: Tensor,
    row_scale: Tensor,
    codes: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    from duotone.weights.kernels import configs
    from duotone.weights.kernels.triton.gemm import gemm_w8a8

    for part, config in configs.gemm_pieces(len(x_q), weight):
        own = None if bias is None else bias[part]
        given = (codes[part], weight.rows(part), x0, own, out.dtype, config, out[:, part])
        gemm_w8a8(x_q, row_scale, *given)


_RUN = {
    "gemv": _run_gemv,
    "w4a8-fused": _run_split,
    "w8a8-split": _run_split,
    "w8a8": _run_w8a8,
    "w8a8-wgmma": _run_wgmma,
    "w4a8-scratch": _run_scratch,
}
# Kernels for many tokens, where a copy would cost time; other results are copied to `out`.
_WRITES = ("w8a8", "w8a8-wgmma", "w4a8-scratch")
