"""The rule of all families whose codes are in records."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from duotone.attention.cuda.shared.geometry import BESIDE_RINGS_KIB
from duotone.attention.cuda.shared.work import QUERY_TYPES
from duotone.attention.family import Tokens
from duotone.attention.refused import RefusedError
from duotone.quant import TensorSpec

CALIBRATED = "score calibration of groups and classes is not in the CUDA kernels"
CALIBRATED_TWICE = "score calibration over several visual segments is not in the CUDA kernels"
SHARED_VISUAL = "layers that share codes have no records of visual tokens"
NO_MASK = "the CUDA kernels take no mask within a packed segment"


@dataclass(frozen=True)
class OfRecords:
    """Rule of a family: no mask, a format of records, a kernel of its shape, calibration.

    format_of: format of records for (key, value, head_dims, apart); raises `RefusedError` where
    there is none. warps_of: warps of a multiprocessor for (format, group, bytes of rings); 0: no
    kernel has this shape.
    calibrates: scores of one visual segment can be calibrated. shares: codes can be apart.
    """

    format_of: Callable[[TensorSpec, TensorSpec, tuple[int, int], Collection[str]], Any]
    warps_of: Callable[[Any, int, int], int]
    calibrates: bool = False
    shares: bool = False

    def __call__(self, tokens: Tokens) -> None:
        """Raise `RefusedError` for tokens that no kernel reads."""
        if tokens.query not in QUERY_TYPES:
            raise RefusedError(f"query must be one of {list(QUERY_TYPES)}; got {tokens.query}")
        if tokens.masked:
            raise RefusedError(NO_MASK)
        if tokens.apart and not self.shares:
            raise RefusedError(SHARED_VISUAL)
        form = tokens.form
        if form is None:
            form = self.format_of(tokens.key, tokens.value, tokens.head_dims, tokens.apart)
        rings_bytes = tokens.shared_bytes - (BESIDE_RINGS_KIB << 10)
        if not self.warps_of(form, tokens.group, rings_bytes):
            raise RefusedError(
                f"no CUDA kernel has this shape; got {form} with {tokens.group} q heads per kv head"
            )
        if tokens.calibrated and not self.calibrates:
            raise RefusedError(CALIBRATED)
        if tokens.calibrated > 1:
            raise RefusedError(CALIBRATED_TWICE)
