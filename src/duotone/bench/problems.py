"""Input of a row: a query and segments with random contents in their packed form.

Nothing is quantized: random codes with random scales take the same time as real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.bench.shapes import Shape
from duotone.cache import BlockTable, DenseSegment, PackedSegment, PackedTensor
from duotone.cache.segments import Segment
from duotone.quant import TensorSpec, pack
from duotone.quant.classes import CLASS_BITS, assign_classes, class_counts
from duotone.quant.packing import packed_bytes
from duotone.quant.slots import fill_slots, group_elements, has_slot, slot_bytes
from duotone.quant.small_floats import small_levels

DTYPE = torch.bfloat16
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One call of decode attention. query: [batch, q_heads, 1, head_dim]."""

    query: Tensor
    segments: tuple[Segment, ...]
    sm_scale: float
    tau: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bytes:
    """Bytes that a call must read, padding of records included."""

    codes: int
    params: int
    dense: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.codes + self.params + self.dense


def bytes_of(problem: Problem) -> Bytes:
    """Bytes of K and V, by the containers' own count; without the query and the output."""
    packed = [s for s in problem.segments if isinstance(s, PackedSegment)]
    dense = [s for s in problem.segments if isinstance(s, DenseSegment)]
    tensors = [t for s in packed for t in (s.key, s.value)]
    norms = [s.key_norm for s in packed if s.key_norm is not None]
    records = [s.records for s in packed if s.records is not None]
    params = sum(r.params_bytes for r in records)
    return Bytes(
        sum(t.codes_bytes for t in tensors) + sum(r.nbytes for r in records) - params,
        sum(t.params_bytes for t in tensors) + sum(norm.nbytes for norm in norms) + params,
        sum(s.key.nbytes + s.value.nbytes for s in dense),
    )


def copy_of(x: T) -> T:
    """Copy of tensors, and of dataclasses and tuples of tensors, in new memory."""
    if isinstance(x, Tensor):
        return x.clone()  # type: ignore[return-value]
    if isinstance(x, tuple):
        return tuple(copy_of(part) for part in x)  # type: ignore[return-value]
    if is_dataclass(x) and not isinstance(x, type):
        parts = {f.name: copy_of(getattr(x, f.name)) for f in fields(x)}
        return replace(x, **parts)
    return x


def random_query(shape: Shape, device: torch.device, head_dim: int | None = None) -> Tensor:
    """[batch, q_heads, 1, head_dim], of variance 1."""
    size = (shape.batch, shape.q_heads, 1, head_dim or shape.head_dim)
    return torch.randn(size, device=device, dtype=DTYPE)


def random_dense(shape: Shape, tokens: int, device: torch.device) -> DenseSegment:
    """16-bit K and V."""
    size = (shape.batch, shape.kv_heads, tokens, shape.head_dim)
    key, value = (torch.randn(size, device=device, dtype=DTYPE) for _ in range(2))
    return DenseSegment(key, value, torch.full((shape.batch,), tokens, device=device))


def random_packed(
    batch: int, heads: int, tokens: int, head_dim: int, spec: TensorSpec, device: torch.device
) -> PackedTensor:
    """Random codes; scales and zero_points put the numbers in -1..2, whatever the width."""
    step = spec.group if spec.along == "tokens" and spec.group else tokens
    edges = [*range(0, tokens, step), tokens]
    blocks = BlockTable(torch.tensor([edges] * batch, device=device))
    if spec.along == "tokens":
        shape = (batch, heads, blocks.blocks, head_dim)
    else:
        shape = (batch, heads, tokens, head_dim // (spec.group or head_dim))
    counts = class_counts(spec, head_dim) if spec.classes else [(spec.bits, shape[-1])]
    levels = torch.tensor([1 << bits for bits, count in counts for _ in range(count) if bits])
    scale = torch.rand(*shape[:3], len(levels), device=device) + 1
    parts = {"codes": _random_bytes((batch, heads, tokens, _row_bytes(spec, head_dim)), device)}
    if spec.classes:
        numbers = assign_classes(torch.rand(shape, device=device), spec)
        parts["classes"] = pack(numbers, CLASS_BITS)
    parts |= _random_offsets(spec, shape, tokens, head_dim, device)
    parts["scale"] = (scale / levels.to(device)).half()
    if spec.param_dtype == "float8":
        top = F.pad(levels.to(device) - 1, (0, shape[-1] - len(levels)))
        rows = small_levels(parts["scale"], parts["zero_point"], top)
        parts |= dict(zip(("scale", "zero_point"), rows, strict=True))
    return PackedTensor(spec=spec, head_dim=head_dim, dtype=DTYPE, blocks=blocks, **parts)


def _random_offsets(
    spec: TensorSpec, shape: tuple[int, ...], tokens: int, head_dim: int, device: torch.device
) -> dict[str, Tensor]:
    """Arrays next to codes and scales: zero_points; signs; both in slots, with the modes."""
    if spec.mapping == "symmetric":
        signs = (*shape[:2], tokens, packed_bytes(head_dim, 1))
        return {"negative": _random_bytes(signs, device)}
    zero_point = (torch.rand(shape, device=device) - 1).half()
    if spec.mapping == "asymmetric":
        return {"zero_point": zero_point}
    if not has_slot(spec):
        raise ValueError(f"random hybrids have groups with slots; got {spec}.")
    signs = torch.rand(*shape, group_elements(spec, head_dim), device=device) < 0.5
    modes = torch.rand(shape, device=device) < 0.5
    slots = fill_slots(zero_point, signs, modes, slot_bytes(spec, head_dim))
    return {"slot": slots, "symmetric": pack(modes.byte(), 1)}


def _random_bytes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _row_bytes(spec: TensorSpec, head_dim: int) -> int:
    """Bytes of one token's codes."""
    counts: Any = class_counts(spec, head_dim) if spec.classes else [(spec.bits, head_dim)]
    return sum(packed_bytes(count, bits) for bits, count in counts)
