"""Decode attention on short spans in canonical order, in one launch per segment.

The plain-torch reference is `attention.reference.attend` on the same segment. Products and sums are
fp32; scales, zero-points and codes are exact.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.shared.geometry import Geometry, multiprocessors, shared_bytes
from duotone.attention.cuda.shared.work import Call, Task, Work
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

SOURCE = "short/decode.cu"
WARPS = 4
# Tokens of a lane that are staged together, at most.
MOST_ROUNDS = 3
LANES, SLOT_ALIGNMENT_BYTES = 32, 128
# Numbers in fp32 that a thread has room for, by blocks of a multiprocessor. Half as many more
# blocks would not spill either. They were slower in four of seven cases, faster in one
# (dev/log/kernels.md).
NUMBERS = {4: 48, 3: 84, 2: 180}
# What a part costs a call in addition to its spans, in times of a warp's span.
PART_COST = 0.1


class Arguments(Call):
    """`Arguments` of short/decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "key", "value", "k_numbers", "v_numbers", "k_scale", "k_zero", "v_scale", "v_zero",
        )),
        *((name, ctypes.c_int) for name in ("row_tokens", "spans")),
    )  # fmt: skip


@dataclass(frozen=True)
class Side:
    """Rows of codes of K or of V. ranked: classes of channels differ by span. small: scales and
    zero-points have 8 bits.
    """

    classes: Classes
    ranked: bool
    small: bool

    @classmethod
    @cache
    def of(cls, spec: TensorSpec, head_dim: int) -> Side:
        """Rows of a spec."""
        small = spec.param_dtype == "float8"
        return cls(Classes.of(spec, head_dim), spec.classes is not None, small)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's codes."""
        return sum(-(-bits * n // 8) for bits, n in self.classes.sizes)

    @property
    def slots(self) -> int:
        """Places of codes in bytes, of each class filled up to a multiple of 8."""
        return sum(8 * -(-(-(-bits * n // 8) * 8 // bits) // 8) for bits, n in self.classes.sizes)

    def macros(self, name: str) -> dict[str, int]:
        """Macros of one side, named by a letter."""
        counts = {f"{name}N{bits}": self.classes.width(bits) for bits in (4, 2, 1)}
        return {**counts, f"{name}_RANKED": int(self.ranked), f"{name}_SMALL": int(self.small)}


@dataclass(frozen=True)
class ShortFormat:
    """Sizes that follow from the quantizers of K and V.

    rounds: tokens of a lane that are staged together.
    """

    head_dim: int
    key: Side
    value: Side
    rounds: int = MOST_ROUNDS
    stages: int = 2

    @property
    def channels(self) -> int:
        """head_dim."""
        return self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens that a warp stages together."""
        return LANES * self.rounds

    @property
    def nbytes(self) -> int:
        """Bytes of the codes that a warp stages."""
        codes = (-(-self.tokens * x.row_bytes // 16) * 16 + 16 for x in (self.key, self.value))
        return sum(codes)

    def warp_bytes(self, group: int) -> int:
        """Shared memory of a warp: sums, q by slot, weights, codes; two whole units."""
        slots = max(self.key.slots, self.value.slots)
        numbers = group * (self.head_dim + 8 + slots + self.tokens)
        unit = self.stages * SLOT_ALIGNMENT_BYTES
        return -(-(4 * numbers + self.nbytes) // unit) * unit

    def block_bytes(self, group: int) -> int:
        """Shared memory of a block, q and weights of its warps included."""
        return WARPS * (self.warp_bytes(group) + 8 * group) + 4 * group * self.head_dim + 128


def per_sm(form: ShortFormat, group: int, shared_bytes: int) -> int:
    """Blocks of a multiprocessor that registers and shared memory leave; 0: no such kernel."""
    columns, mine = -(-form.value.slots // LANES), -(-form.head_dim // LANES)
    numbers = group * (columns + form.rounds + 5) + mine * (mine + 8) // 2 + 3 * columns
    fitting = (
        n
        for n, most in NUMBERS.items()
        if numbers <= most and n * (form.block_bytes(group) + 1024) <= shared_bytes + 1024
    )
    return next(fitting, 0)


@cache
def geometry(form: ShortFormat, blocks: int, heads: int, spans: int, sms: int) -> Geometry:
    """Cut a launch. blocks: of a multiprocessor. heads: batch * kv_heads."""
    most = max(1, -(-spans // WARPS))

    def cost(parts: int) -> float:
        waves = -(-heads * parts // (blocks * sms))
        return waves * -(-spans // (parts * WARPS)) + PART_COST * parts

    return Geometry(WARPS, blocks, min(range(1, most + 1), key=cost))


def form_of(key: TensorSpec, value: TensorSpec, head_dim: int, longest: int) -> ShortFormat:
    """Format for spans of up to `longest` tokens."""
    rounds = max(1, min(MOST_ROUNDS, -(-longest // LANES)))
    return ShortFormat(head_dim, Side.of(key, head_dim), Side.of(value, head_dim), rounds)


def short_task(
    query: Tensor, segment: PackedSegment, tau: tuple[float, float] | None = None
) -> Task:
    """The launch over one segment. query: [batch, q_heads, 1, head_dim], contiguous.

    Where V is rotated, so is the output. tau: for other segments only.
    """
    key, value = segment.key, segment.value
    spans = value.blocks
    form = form_of(key.spec, value.spec, key.head_dim, spans.longest)
    work = Work(query, form, key.codes.shape[1], spans.blocks, spans.offsets)
    device = query.device
    blocks = per_sm(form, work.group, shared_bytes(device))
    at = geometry(form, blocks, work.heads, spans.blocks, multiprocessors(device))
    tensors = {
        "key": key.codes,
        "value": value.codes,
        "k_numbers": key.classes,
        "v_numbers": value.classes,
        "k_scale": key.scale,
        "k_zero": key.zero_point,
        "v_scale": value.scale,
        "v_zero": value.zero_point,
    }

    def arguments(**call: Any) -> Arguments:
        given = {name: None if x is None else x.data_ptr() for name, x in tensors.items()}
        return Arguments(**given, row_tokens=key.tokens, spans=spans.blocks, **call)

    nbytes = WARPS * form.warp_bytes(work.group)
    return Task(SOURCE, work, at, macros_of(form, work.group), arguments, shared_bytes=nbytes)


def macros_of(form: ShortFormat, group: int) -> dict[str, int]:
    """Macros of short/decode.cu in addition to those of all kernels."""
    return {
        **form.key.macros("K"),
        **form.value.macros("V"),
        "ROUNDS_OF_TOKENS": form.rounds,
        "SLOT_BYTES": form.warp_bytes(group) // form.stages,
    }
