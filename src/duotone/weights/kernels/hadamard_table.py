"""Table of a Hadamard transform's base, as kernels read it: folded, padded, on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from duotone.tools.kept import is_capturing, kept
from duotone.weights.equivalences.hadamard_bases import sylvester

# Rows of a tile, as the product of a warp group of four has; a unit of a kernel has up to four.
TILE = 64
# Columns of the product with Sylvester's matrix, at most.
_MOST_COLUMNS = 128
# The base of Sylvester's matrices. On the host: a CUDA graph's capture cannot leave it unwritten.
ONE = torch.ones(1, 1, dtype=torch.int8)
_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def folded(m: int, p: int) -> tuple[int, int]:
    """(rows, p): the unit [m, p] as a matrix of at most 128 columns; both hold the same order."""
    columns = min(p, _MOST_COLUMNS)
    return m * (p // columns), columns


def base_table(base: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H_m (x) H_(rows / m) in a corner, zeros beyond; the size is a power of two, TILE at least.

    Kept as long as `base` [m, m] is. Errors: RuntimeError if it is new while a CUDA graph is
    captured.
    """
    tables = _tables.setdefault(base, {})
    if (rows, dtype, device) not in tables:
        if is_capturing(device):
            raise RuntimeError(
                f"the table of a Hadamard base [{rows}, {rows}] must exist before a CUDA graph is "
                "captured; run the same call once before the capture"
            )
        made = kept(lambda: _table(base, rows, dtype, device), device)
        tables.setdefault((rows, dtype, device), made)  # of several threads the first one's
    return tables[rows, dtype, device]


def _table(base: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    power = sylvester(rows // len(base)).to(device)
    size = max(TILE, 1 << (rows - 1).bit_length())
    made = torch.zeros(size, size, dtype=dtype, device=device)
    made[:rows, :rows] = torch.kron(base.to(power), power)
    return made
