"""Merge all parts of a call whose values are in one or two bases, and rotate them back, at once.

The plain-torch reference is `decode.attend_by_basis`: `merge_partials` of the outputs of each
basis, rotated back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from duotone.attention.cuda.rotate.queries import Tiles, tiles
from duotone.attention.cuda.shared.geometry import multiprocessors
from duotone.attention.cuda.shared.launch import OVERLAP, launch_merging
from duotone.attention.cuda.shared.runtime import Launch, PreparedLaunch
from duotone.attention.cuda.shared.work import Call, Fields, Work

SOURCE = "rotate/merge.cu"
# Fields of each basis: its matrices, numbers between them, and its parts.
NAMES = (
    ("matrices", "matrix_stride", "rotated_parts"),
    ("other_matrices", "other_stride", "other_parts"),
)
MOST_BASES = len(NAMES)


class Arguments(Call):
    """`Arguments` of rotate/merge.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matrices", "other_matrices")),
        *((name, ctypes.c_longlong) for name in ("matrix_stride", "other_stride")),
        *((name, ctypes.c_int) for name in ("rotated_parts", "other_parts", "rows")),
    )


@dataclass(frozen=True)
class MergeTurned:
    """Merging launch for `launch.run`, which rotates parts back.

    matrices: out of each basis; a single one where all kv heads share it. parts: number of parts of
    each kv head whose values are in each basis; they come first, basis by basis.
    """

    matrices: Sequence[Float[Tensor, "kv_heads channels channels"]]
    parts: Sequence[int]

    def __call__(self, work: Work, out: Tensor, fields: Fields) -> PreparedLaunch:
        """Merge into `out`, by one launch, which is returned."""
        channels, rows = work.format.head_dim, work.heads // work.kv_heads * work.group
        given = Arguments(**fields, units=work.heads, kv_heads=work.kv_heads, rows=rows)
        for names, matrices, parts in zip(NAMES, self.matrices, self.parts, strict=False):
            stride = channels**2 if len(matrices) > 1 else 0
            for name, value in zip(names, (matrices.data_ptr(), stride, parts), strict=True):
                setattr(given, name, value)
        bases = len(self.parts)
        at = tiles(channels, work.kv_heads, rows, multiprocessors(out.device))
        nbytes = shared_bytes(at, channels, bases)
        launch = Launch(at.blocks, at.threads, nbytes, overlap=OVERLAP)
        return launch_merging(SOURCE, launch, given, work, out, {"BASES": bases, **at.macros})


def shared_bytes(at: Tiles, channels: int, bases: int = 1) -> int:
    """Shared memory of a block: all sums, then the sums of every share, later of every slice."""
    all_bytes = -(-4 * at.rows * ((bases + 1) * channels + 2) // 16) * 16
    shares = 4 * at.threads // (at.rows * channels)
    return all_bytes + max(shares * all_bytes, at.sums_bytes)
