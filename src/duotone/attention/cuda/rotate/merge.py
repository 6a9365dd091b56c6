"""Merge all parts of a call whose values are in a basis, and rotate them back, in one launch.

The plain-torch reference is `decode.attend_by_basis`: `merge_partials` of the outputs of each
basis, rotated back.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from duotone.attention.cuda.rotate.queries import Tiles, tiles
from duotone.attention.cuda.shared.geometry import multiprocessors
from duotone.attention.cuda.shared.launch import OVERLAP, launch_merging
from duotone.attention.cuda.shared.runtime import Launch, PreparedLaunch
from duotone.attention.cuda.shared.work import Call, Fields, Work

SOURCE = "rotate/merge.cu"


class Arguments(Call):
    """`Arguments` of rotate/merge.cu."""

    _fields_ = (
        ("matrices", ctypes.c_void_p),
        ("matrix_stride", ctypes.c_longlong),
        ("rotated_parts", ctypes.c_int),
        ("rows", ctypes.c_int),
    )


@dataclass(frozen=True)
class MergeTurned:
    """Merging launch for `launch.run`, which rotates parts back.

    matrices: out of the basis; a single one where all kv heads share it. parts: number of parts of
    each kv head whose values are in the basis; they come first.
    """

    matrices: Float[Tensor, "kv_heads channels channels"]
    parts: int

    def __call__(self, work: Work, out: Tensor, fields: Fields) -> PreparedLaunch:
        """Merge into `out`, by one launch, which is returned."""
        channels, rows = work.format.head_dim, work.heads // work.kv_heads * work.group
        given = Arguments(
            **fields,
            units=work.heads,
            kv_heads=work.kv_heads,
            matrices=self.matrices.data_ptr(),
            matrix_stride=channels**2 if len(self.matrices) > 1 else 0,
            rotated_parts=self.parts,
            rows=rows,
        )
        at = tiles(channels, work.kv_heads, rows, multiprocessors(out.device))
        launch = Launch(at.blocks, at.threads, shared_bytes(at, channels), overlap=OVERLAP)
        return launch_merging(SOURCE, launch, given, work, out, at.macros)


def shared_bytes(at: Tiles, channels: int) -> int:
    """Shared memory of a block: all sums, then the sums of every share, later of every slice."""
    all_bytes = -(-8 * at.rows * (channels + 1) // 16) * 16
    shares = 4 * at.threads // (at.rows * channels)
    return all_bytes + max(shares * all_bytes, at.sums_bytes)
