"""Gate and up of an MLP on int8 codes, multiplied in one launch: activation(gate) * up.

    codes -> activation(gate) * up [tokens, channels] -> Hadamard, codes -> down

Gate and up are not rounded before they are activated and multiplied, where two products round both
to 16 bit. The result is as exact as one rounding, and a later code may differ by one from the two
products'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.weights.kernels.cuda import wgmma_gated, wgmma_gemm
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.gate import Gate
from duotone.weights.modules.linear import choose, linear_int
from duotone.weights.modules.product_checks import check_out, check_product
from duotone.weights.modules.quantize_rows import activate

KERNEL = "w8a8-wgmma"
IMPLEMENTATIONS = ("auto", "reference", KERNEL)


def gated_product(
    x_q: Tensor,
    row_scale: Tensor,
    gate: Gate,
    impl: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """activation(x_q * gate) * (x_q * up), products as `linear_int` has them, rounded to `dtype`.

    Sums are exact, products scaled in fp32 as by `linear_int`. The kernel takes sigmoid(z) from two
    approximations of 2^-22. Before rounding to `dtype`, a number's relative error is below 2^-20
    where |z| < 8, and below |z| 2^-23 beyond.

    x_q: int8 [tokens, in]. row_scale: float32 [tokens], [1] or []. gate: with no split column.
    out: [tokens, channels] of dtype, contiguous, to write it to.
    impl: "reference" runs everywhere; "w8a8-wgmma" is a kernel for Hopper; "auto" takes it where it
        `pays`.
    Returns [tokens, channels].
    Errors: ValueError for arguments that do not fit, and for an `impl` that cannot do this.
    """
    for weight, bias in gate.products:
        check_product(x_q, row_scale, weight, None, bias, dtype)
    check_out(out, (len(x_q), gate.channels), dtype, x_q.device)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}; got {impl!r}")
    reason = unsupported(gate)
    if impl == KERNEL and reason is not None:
        raise ValueError(f"impl={impl!r} cannot run this: {reason}")
    if not len(x_q) or impl == "reference" or (impl == "auto" and not pays(len(x_q), gate)):
        y = gated_reference(x_q, row_scale, gate, dtype)
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty(len(x_q), gate.channels, dtype=dtype, device=x_q.device)
    return wgmma_gated.gated_wgmma(x_q.contiguous(), row_scale, gate, out)


def gated_reference(x_q: Tensor, row_scale: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """Compute `gated_product` in plain torch, on any device."""
    first, second = (
        linear_int(x_q, row_scale, weight, None, bias, "reference", torch.float32)
        for weight, bias in gate.products
    )
    return activate(first, gate.activation, second).to(dtype)


def pays(tokens: int, gate: Gate) -> bool:
    """True if one launch can do it, where `linear_int` would take warpgroup products too."""
    if unsupported(gate) is not None:
        return False
    return choose(tokens, gate.gate, has_kernels(gate.gate.codes.device)) == KERNEL


def unsupported(gate: Gate) -> str | None:
    """Reason why one launch cannot do it, or None."""
    return wgmma_gated.unsupported(gate) or wgmma_gemm.missing(gate.gate.codes.device)
