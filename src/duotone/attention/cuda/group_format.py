"""What group records hold: how K and V are stored in a tile, and which specs have such records."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.attention.cuda.tiled import Tiled
from duotone.quant import TensorSpec

TILE = 32
RECORD_BYTES = 3072
WIDTHS = (1, 2, 4)


@dataclass(frozen=True)
class Operand:
    """How K or V of a tile are stored. along_k: a scale for a run of what is summed over."""

    bits: int
    along_k: bool
    group: int
    signs: bool

    def groups(self, rows: int, k: int) -> int:
        """Scales of a matrix of rows by k."""
        return rows * -(-k // self.group) if self.along_k else -(-rows // self.group) * k


@dataclass(frozen=True)
class GroupFormat(Tiled):
    """Sizes that follow from head_dim and how K and V are stored."""

    head_dim: int
    key: Operand
    value: Operand
    tile_tokens, record_bytes = TILE, RECORD_BYTES

    @property
    def part_bytes(self) -> list[int]:
        """Of a tile: codes of K and of V, scales of K and of V."""
        sizes = ((self.key, TILE, self.channels), (self.value, self.channels, TILE))
        codes = [TILE * self.channels * x.bits // 8 for x, _, _ in sizes]
        return codes + [x.groups(rows, k) * (6 if x.signs else 4) for x, rows, k in sizes]

    @property
    def tile_bytes(self) -> int:
        """Codes and scales of 32 tokens."""
        return sum(self.part_bytes)


def operand_reason(spec: TensorSpec, which: str) -> str | None:
    """Why K ("key") or V ("value") of a spec cannot be in group records, or None."""
    if spec.bits not in WIDTHS or spec.param_dtype != "float16" or spec.along == "span":
        return f"group records have {WIDTHS} bits and float16 scales along one axis; got {spec}"
    if spec.classes is not None:
        return f"group records hold codes of one width; got {spec}"
    if spec.group is None and spec.along == "tokens":
        return f"group records need groups along tokens; got {spec}"
    if spec.group is not None and (spec.group % 32 or spec.group & (spec.group - 1)):
        return f"group records need groups of 32, 64 or 128; got {spec}"
    if spec.mapping != "asymmetric" and (not _along_k(spec, which) or spec.group != 32):
        return f"signs need groups of 32 along what a product sums over; got {spec}"
    return None


def _along_k(spec: TensorSpec, which: str) -> bool:
    return (spec.along == "channels") == (which == "key")


def operand_of(spec: TensorSpec, head_dim: int, which: str) -> Operand | str:
    """The operand that K ("key") or V ("value") is, or why the kernel has none for it."""
    reason = operand_reason(spec, which)
    if reason is not None:
        return reason
    group = spec.group or head_dim
    whole = spec.along == "tokens" or (head_dim % group == 0 and group % 32 == 0)
    if not whole or group & (group - 1):
        return f"groups along channels must be 32, 64 or 128 and divide {head_dim}; got {spec}"
    return Operand(spec.bits, _along_k(spec, which), group, spec.mapping != "asymmetric")
