"""The Hadamard transform of activations at run time, alone or fused with quantization.

x [tokens, blocks * m * p] is transformed by blocks, each a matrix [m, p]: y = (H_m (x) H_p) x /
sqrt(m p), with a given H_m and Sylvester's H_p (QuaRot). Unlike in QuaRot's tables, row 0 of H_m is
all +1, so that RMS can split channel 0 off.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.equivalences.hadamard_bases import sylvester
from duotone.weights.modules.quantize_rows import Rows, activate, check_rows, chosen_impl, to_codes


def hadamard(x: Tensor, blocks: int, base: Tensor | None, p: int, impl: str = "auto") -> Tensor:
    """The transform of x [tokens, blocks * m * p], rows may be strided, in the dtype of x.

    base: [m, m] of +-1 or None for m = 1. p: a power of two.
    Errors: ValueError for sizes that do not fit.
    """
    check_rows(x, None, None, None)
    if missing_channels(x.shape[1], blocks, base, p):
        raise ValueError(f"{_sizes_rule(x.shape[1], blocks, base, p)}; pad with zeros first")
    if chosen_impl(impl, x) == "reference" or not _fits(base, p):
        return hadamard_reference(x.double(), blocks, base, p).to(x.dtype)
    from duotone.weights.kernels.triton.hadamard import hadamard_rows

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

    x, up: [tokens, channels], rows may be strided; fewer channels than blocks * m * p are padded
    with zeros. scale: static, float32 [tokens], [1] or []. split: channel 0 of the result is
    returned in float32, [tokens], and has code 0.
    """
    check_rows(x, scale, up, activation)
    missing = missing_channels(x.shape[1], blocks, base, p)
    if chosen_impl(impl, x) == "reference" or not _fits(base, p):
        y = F.pad(activate(x, activation, up).to(x.dtype).double(), (0, missing))
        y = hadamard_reference(y, blocks, base, p).float()
        x0 = y[:, 0].contiguous() if split else None
        codes = to_codes(y, scale)
        if split:
            codes[:, 0] = 0
        return Rows(codes, scale), x0
    from duotone.weights.kernels.triton.hadamard import hadamard_rows

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


def missing_channels(columns: int, blocks: int, base: Tensor | None, p: int) -> int:
    """Zeros that make `columns` channels blocks * m * p, p a power of two, base [m, m].

    Errors: ValueError for sizes that do not fit.
    """
    if p < 1 or p & (p - 1):
        raise ValueError(f"p must be a power of two; got {p}")
    if base is not None and (base.dim() != 2 or base.shape[0] != base.shape[1]):
        raise ValueError(f"base must be a square matrix; got {tuple(base.shape)}")
    missing = blocks * (1 if base is None else len(base)) * p - columns
    if missing < 0:
        raise ValueError(f"{_sizes_rule(columns, blocks, base, p)}; take a larger transform")
    return missing


def _sizes_rule(columns: int, blocks: int, base: Tensor | None, p: int) -> str:
    m = 1 if base is None else len(base)
    return f"blocks * m * p must be the {columns} channels; got {blocks} * {m} * {p}"


def _fits(base: Tensor | None, p: int) -> bool:
    """True if kernels have room for the base: powers of two above 128 are folded into it."""
    if base is None:
        return p <= 16384
    return len(base) * max(1, p // 128) <= 256
