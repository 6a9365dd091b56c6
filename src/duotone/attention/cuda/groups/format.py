"""Contents of group records: how a tile stores K and V, and which specs have such records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from duotone.attention.cuda.shared.tiles import Tiled
from duotone.attention.refused import RefusedError
from duotone.quant import TensorSpec
from duotone.quant.honours import Honours

HONOURS = Honours.of("group records", {"bits", "along", "group", "mapping", "transform"}, (1, 2, 4))
TILE = 32
RECORD_BYTES = 3072
MAX_CHANNELS = 256
# Separate codes are filled up to so many tiles: whole records of any format.
APART_TILES = 4


@dataclass(frozen=True)
class Operand:
    """Storage of K or V in a tile. along_k: a scale for a run of what is summed over.

    apart: codes are not in the records but in a buffer of their own, because layers share them.
    """

    bits: int
    along_k: bool
    group: int
    signs: bool
    apart: bool = False

    def groups(self, rows: int, k: int) -> int:
        """Scales of a matrix of rows by k."""
        return rows * -(-k // self.group) if self.along_k else -(-rows // self.group) * k

    def macros(self, name: str) -> dict[str, int]:
        """Macros of sources, but for what they say of signs. name: K or V."""
        return {
            f"{name}B": self.bits,
            f"{name}_ALONG_K": int(self.along_k),
            f"{name}_GROUP": self.group,
            f"{name}_SEPARATE": int(self.apart),
        }


@dataclass(frozen=True)
class GroupFormat(Tiled):
    """Sizes that follow from head_dim and how K and V are stored."""

    head_dim: int
    key: Operand
    value: Operand
    tile_tokens, record_bytes = TILE, RECORD_BYTES

    @cached_property
    def part_bytes(self) -> list[int]:
        """Bytes of a tile: codes of K and of V, scales of K and of V."""
        sizes = ((self.key, TILE, self.channels), (self.value, self.channels, TILE))
        codes = [TILE * self.channels * x.bits // 8 for x, _, _ in sizes]
        return codes + [x.groups(rows, k) * (6 if x.signs else 4) for x, rows, k in sizes]

    @cached_property
    def tile_bytes(self) -> int:
        """Codes and scales of 32 tokens."""
        return sum(self.part_bytes)

    @property
    def is_apart(self) -> bool:
        """Codes of K or of V are not in the records."""
        return self.key.apart or self.value.apart

    @property
    def own_part_bytes(self) -> list[int]:
        """As `part_bytes`, with 0 for separate codes."""
        apart = (self.key.apart, self.value.apart, False, False)
        return [0 if a else n for a, n in zip(apart, self.part_bytes, strict=True)]

    @property
    def own_tile_bytes(self) -> int:
        """Bytes of a tile that its record holds."""
        return sum(self.own_part_bytes)

    @property
    def own_nbytes(self) -> int:
        """Bytes of a record without separate codes; `nbytes` counts them."""
        return self.tiles * self.own_tile_bytes


def _along_k(spec: TensorSpec, which: str) -> bool:
    return (spec.along == "channels") == (which == "key")


def operand_of(spec: TensorSpec, head_dim: int, which: str) -> Operand:
    """Operand that K ("key") or V ("value") is.

    Errors: `RefusedError` where the kernel has none.
    """
    if reason := HONOURS.refusal(spec):
        raise RefusedError(f"{reason}, {which} is {spec}")
    if spec.along == "span":
        raise RefusedError(f"group records have scales along one axis; got {spec}")
    if spec.group is None and spec.along == "tokens":
        raise RefusedError(f"group records need groups along tokens; got {spec}")
    if spec.group is not None and (spec.group % 32 or spec.group & (spec.group - 1)):
        raise RefusedError(f"group records need groups of 32, 64 or 128; got {spec}")
    if spec.mapping != "asymmetric" and (not _along_k(spec, which) or spec.group != 32):
        raise RefusedError(f"signs need groups of 32 along what a product sums over; got {spec}")
    group = spec.group or head_dim
    whole = spec.along == "tokens" or (head_dim % group == 0 and group % 32 == 0)
    if not whole or group & (group - 1):
        raise RefusedError(
            f"groups along channels must be 32, 64 or 128 and divide {head_dim}; got {spec}"
        )
    return Operand(spec.bits, _along_k(spec, which), group, spec.mapping != "asymmetric")


def format_of(
    key: TensorSpec, value: TensorSpec, head_dims: tuple[int, int], apart: Collection[str] = ()
) -> GroupFormat:
    """Format of streams of K and V. apart: as `Operand.apart`.

    Errors: `RefusedError` where there is none.
    """
    if value.transform is not None:
        raise RefusedError(f"the CUDA kernels do not rotate outputs back; value is {value}")
    if key.along == value.along == "channels":
        # Tokens leave the window one by one, tiles are whole.
        raise RefusedError(
            f"group records need groups along tokens in K or V; got {key} and {value}"
        )
    parts = [
        replace(operand_of(spec, head_dim, which), apart=which in apart)
        for spec, head_dim, which in zip((key, value), head_dims, ("key", "value"), strict=True)
    ]
    # Lowest bits of codes stand among the scales.
    signs_apart = any(operand.signs and operand.apart for operand in parts)
    if head_dims[0] != head_dims[1] or head_dims[0] > MAX_CHANNELS or signs_apart:
        raise RefusedError(
            f"no group records for this stream; got head_dim {head_dims[0]}, shared {sorted(apart)}"
        )
    return GroupFormat(head_dims[0], *parts)
