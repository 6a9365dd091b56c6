"""The Hadamard transform of activations at run time, alone or fused with quantization.

x [tokens, blocks * m * p] is transformed by blocks, each a matrix [m, p]:
y = (H_m (x) H_p) x / sqrt(m p), H_m a given matrix, H_p Sylvester's (QuaRot; row 0 of H_m all +1,
where QuaRot's tables are not, so that RMS can split channel 0 off).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from duotone.weights.hadamard_bases import sylvester
from duotone.weights.quantize_rows import Rows, activate, check_rows, chosen_impl, to_codes


def hadamard(x: Tensor, blocks: int, base: Tensor | None, p: int, impl: str = "auto") -> Tensor:
    """The transform of x [tokens, blocks * m * p], rows may be strided, in the dtype of x.

    base: [m, m] of +-1 or None for m = 1. p: a power of two.
    Errors: ValueError for sizes that do not fit.
    """
    check_rows(x, None, None, None)
    check_sizes(x.shape[1], blocks, base, p)
    if chosen_impl(impl, x) == "reference" or not _fits(base, p):
        return hadamard_reference(x.double(), blocks, base, p).to(x.dtype)
    from duotone.weights.kernels.triton_hadamard import hadamard_rows

    return hadamard_rows(x, blocks, base, p)[0]


def hadamard_quantize(
    x: Tensor,
    scale: Tensor,
    blocks: int,
    base: Tensor | None,
    p: int,
    *,
    activation: str | None = None,
    up: Tensor | None = None,
    split: bool = False,
    impl: str = "auto",
) -> tuple[Rows, Tensor | None]:
    """Codes of the transform of activation(x) * up, which is rounded to the dtype of x before.

    scale: static, float32 [tokens], [1] or []. split: channel 0 of the result is returned in the
    dtype of x, [tokens], and has code 0.
    """
    check_rows(x, scale, up, activation)
    check_sizes(x.shape[1], blocks, base, p)
    if chosen_impl(impl, x) == "reference" or not _fits(base, p):
        y = activate(x, activation, up).to(x.dtype).double()
        y = hadamard_reference(y, blocks, base, p).float()
        x0 = y[:, 0].to(x.dtype) if split else None
        codes = to_codes(y, scale)
        if split:
            codes[:, 0] = 0
        return Rows(codes, scale), x0
    from duotone.weights.kernels.triton_hadamard import hadamard_rows

    codes, x0 = hadamard_rows(
        x, blocks, base, p, scale=scale, up=up, activation=activation, split=split
    )
    return Rows(codes, scale), x0


def hadamard_reference(x: Tensor, blocks: int, base: Tensor | None, p: int) -> Tensor:
    """The transform by its definition, in the dtype of x [tokens, blocks * m * p]."""
    matrix = sylvester(p).to(x)
    if base is not None:
        matrix = torch.kron(base.to(x).contiguous(), matrix)
    units = x.reshape(len(x), blocks, len(matrix))
    # Autocast would round the products to 16 bit.
    with torch.autocast(x.device.type, enabled=False):
        y = units @ matrix.T
    return (y / math.sqrt(len(matrix))).reshape(x.shape)


def check_sizes(columns: int, blocks: int, base: Tensor | None, p: int) -> None:
    """Errors: ValueError unless columns = blocks * m * p, p a power of two, base [m, m]."""
    if p < 1 or p & (p - 1):
        raise ValueError(f"p must be a power of two; got {p}")
    if base is not None and (base.dim() != 2 or base.shape[0] != base.shape[1]):
        raise ValueError(f"base must be a square matrix; got {tuple(base.shape)}")
    m = 1 if base is None else len(base)
    if blocks * m * p != columns:
        raise ValueError(
            f"blocks * m * p must be the {columns} channels; got {blocks} * {m} * {p}; "
            "pad with zeros first"
        )


def _fits(base: Tensor | None, p: int) -> bool:
    """A block is small enough for one program of the kernel."""
    m = 1 if base is None else max(16, 1 << (len(base) - 1).bit_length())
    return m * max(16, p) <= 32768 and p <= 16384
