"""Choose the kernels of an online Hadamard transform by the number of rows.

No base: one kernel (`triton.sylvester`), but for large powers of two, which are folded into a base
of one. A base, many rows of 16 bit: one kernel, a program per unit
(`triton.hadamard_base.base_kernel`). Few rows would leave most of the device idle, and fp32
products need more room. Both run Sylvester's part into fp32 memory, then the base's part, each in
many small programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.weights.kernels.hadamard_table import ONE, TILE, folded
from duotone.weights.kernels.triton.hadamard_base import BaseConfig, base_units
from duotone.weights.kernels.triton.hadamard_columns import ColumnsConfig, base_columns
from duotone.weights.kernels.triton.sylvester import sylvester_rows


@dataclass(frozen=True)
class HadamardConfig:
    """few_units: the most units (a block of a row each) for which two launches are faster than one.

    many: None to choose by the number of units.
    """

    few_units: int = 15
    many: BaseConfig | None = None
    few: ColumnsConfig = field(default_factory=ColumnsConfig)


DEFAULT = HadamardConfig()
# Sylvester's matrices of this order and above are products with a base of 1 too, in whole rows of
# 128 columns. There `sylvester_kernel` has room for only one program on a multiprocessor.
_FOLDED = 8192
# Up to so many units an H200's multiprocessor has two at most, and latency counts: more warps each.
_MIDDLE_UNITS = 264


def hadamard_rows(
    x: Tensor,
    blocks: int,
    base: Tensor | None,
    p: int,
    *,
    scale: Tensor | None = None,
    up: Tensor | None = None,
    activation: str | None = None,
    split: bool = False,
    config: HadamardConfig = DEFAULT,
) -> tuple[Tensor, Tensor | None]:
    """Launch. x, up: [tokens, up to blocks * m * p], rows may be strided. base: [m, m] or None.

    Returns (int8 codes with a scale, else the transform in the dtype of x; channel 0 if split).
    """
    if base is None and p >= _FOLDED and x.dtype != torch.float32:
        base = ONE
    tokens, m = len(x), 1 if base is None else len(base)
    kind, padded = x.dtype if scale is None else torch.int8, blocks * m * p
    y = torch.empty(tokens, padded, dtype=kind, device=x.device)
    x0 = torch.empty(tokens, dtype=torch.float32, device=x.device) if split else None
    norm = 1 / math.sqrt(m * p)
    given = {"up": up, "activation": activation}
    if base is None:
        sylvester_rows(x, y, blocks, p, norm, scale=scale, x0=x0, **given)
        return y, x0
    rows, p = folded(m, p)
    if tokens * blocks > config.few_units and x.dtype != torch.float32:
        many = config.many or _base_config(tokens * blocks, rows)
        base_units(x, y, x0, blocks, base, rows, p, norm, scale, many, **given)
        return y, x0
    half = torch.empty(tokens, padded, dtype=torch.float32, device=x.device)
    sylvester_rows(x, half, blocks * rows, p, 1.0, **given)
    # fp32 has 24 bits, 8 a part; of 16-bit inputs two parts keep more than their codes show
    parts = 3 if x.dtype == torch.float32 else 2
    base_columns(half, y, x0, blocks, base, rows, p, norm, scale, parts, config.few)
    return y, x0


def _base_config(units: int, rows: int) -> BaseConfig:
    """Configuration measured on an H200; of two tiles eight warps take both at once."""
    if not TILE < rows <= 2 * TILE:
        return BaseConfig()
    return BaseConfig(warps=8) if units <= _MIDDLE_UNITS else BaseConfig(registers=128)
