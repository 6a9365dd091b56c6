"""Cases of decode attention for kernels: ragged segments, their poisoned twins, the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duotone.attention import attend
from duotone.cache import (
    BlockTable,
    DenseSegment,
    LayerStore,
    Ledger,
    PackedSegment,
    PackedTensor,
    pack_tensor,
)
from duotone.cache.packed import TOKEN_PARTS
from duotone.cache.ragged import valid_mask
from duotone.cache.segments import Segment
from duotone.quant import CacheSpec, TensorSpec

POISON_BYTE = 0xAA
ONE_BIT = TensorSpec(1)
# Channels of unequal bits: K as the preset has it, and other counts for K and for V.
PRESET_KEY = TensorSpec(
    1, group=64, levels="lloyd", gain="fit", classes=((4, 1 / 16), (2, 1 / 4), (1, 1 / 4))
)
CLASSES_KEY = TensorSpec(1, group=128, classes=((4, 1 / 8), (2, 1 / 4)))
CLASSES_VALUE = TensorSpec(1, classes=((2, 1 / 2), (1, 1 / 4)))
# As calibration writes them, no groups: classes of whole columns, and of half ones at head_dim 64.
CALIBRATED = (
    TensorSpec(levels="lloyd", gain="fit", classes=((4, 1 / 8), (2, 1 / 8), (1, 1 / 4))),
    TensorSpec(levels="lloyd", classes=((4, 1 / 8), (1, 1 / 2))),
)
UNITS = (
    TensorSpec(energy=0.5, classes=((4, 1 / 8), (2, 1 / 4), (1, 3 / 8))),
    TensorSpec(classes=((2, 3 / 8), (1, 1 / 8))),
)
# With scales and zero-points in 8 bits: of spans, and K's in its tiles.
SMALL = tuple(spec.replace(param_dtype="float8") for spec in CALIBRATED)
SMALL_TILES = tuple(spec.replace(param_dtype="float8") for spec in (PRESET_KEY, CLASSES_VALUE))
# InnerQ at 2 bits: groups of 32 along the inner dimension of each product.
INNERQ_KEY = TensorSpec(2, "channels", 32, "hybrid")
INNERQ_VALUE = TensorSpec(2, "tokens", 32, "hybrid")
# The same behind a Hadamard matrix.
ROTATED_KEY, ROTATED_VALUE = (
    spec.replace(transform="hadamard") for spec in (INNERQ_KEY, INNERQ_VALUE)
)
# Relative RMS error, and maximum error over the largest element, against fp64 arithmetic rounded to
# the output's type. fp16 and bf16 queries multiply in fp16 (dense segments: tf32).
TOLERANCES = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (2e-3, 1e-2),
}


@dataclass(frozen=True)
class Case:
    """One call of decode attention.

    lengths: packed tokens of each sequence. spans: how many spans a sequence's tokens are cut into.
    dense: lengths of a second, dense segment, or None. gqa: q heads per kv head.
    spread: factor on K and V, which sm_scale takes back from the scores.
    """

    lengths: tuple[int, ...]
    key: TensorSpec = ONE_BIT
    value: TensorSpec = ONE_BIT
    gqa: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    spans: int = 1
    dense: tuple[int, ...] | None = None
    dense_dtype: torch.dtype = torch.bfloat16
    mask: bool = False
    tau: tuple[float, float] | None = None
    dtype: torch.dtype = torch.float16
    spread: float = 1.0
    key_norm: bool = False

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5 / self.spread

    def __str__(self) -> str:
        parts = [f"n{'_'.join(map(str, self.lengths))}"]
        for name, spec in (("k", self.key), ("v", self.value)):
            bits = "".join(str(bits) for bits, _ in spec.classes or ())
            width = f"classes{bits}" if bits else f"{spec.bits}{spec.along}"
            width += "" if spec.mapping == "asymmetric" else spec.mapping[:3]
            width += "rotated" if spec.transform else ""
            parts.append(f"{name}{width}{spec.group or ''}")
        parts.append(f"g{self.gqa}d{self.head_dim}{str(self.dtype).removeprefix('torch.')}")
        flags = {"value_dim": self.value_dim, "dense": self.dense, "mask": self.mask}
        flags |= {"norm": self.key_norm}
        parts += [name for name, value in flags.items() if value]
        parts += [f"spans{self.spans}"] * (self.spans > 1) + ["tau"] * (self.tau is not None)
        return "-".join(parts)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cut(lengths: Sequence[int], spans: int) -> BlockTable:
    """Tokens of each sequence in `spans` spans of nearly the same length."""
    edges = [[n * i // spans for i in range(spans + 1)] for n in lengths]
    return BlockTable(torch.tensor(edges, device=device()))


def states(batch: int, heads: int, tokens: int, channels: int, spread: float = 1.0) -> Tensor:
    """K or V with outlier channels and an offset per channel, like real ones."""
    x = torch.randn(batch, heads, tokens, channels, device=device())
    strength = torch.linspace(0.5, 2, channels, device=device())
    return (x * strength + torch.randn(channels, device=device())) * spread


def build(case: Case, seed: int = 0) -> tuple[Tensor, list[Segment]]:
    """(query, segments) of a case; every slot holds something finite."""
    torch.manual_seed(seed)
    batch, n = len(case.lengths), max(case.lengths)
    value_dim = case.value_dim or case.head_dim
    lengths = torch.tensor(case.lengths, device=device())
    spans = cut(case.lengths, case.spans)
    key = pack_tensor(states(batch, case.kv_heads, n, case.head_dim, case.spread), case.key, spans)
    value = pack_tensor(states(batch, case.kv_heads, n, value_dim, case.spread), case.value, spans)
    mask = torch.rand(batch, 1, n, device=device()) < 0.7 if case.mask else None
    norm = 0.5 + torch.rand(batch, case.kv_heads, case.head_dim, device=device())
    packed = PackedSegment(key, value, lengths, True, mask, norm if case.key_norm else None)
    kv: list[Segment] = [packed]
    if case.dense is not None:
        width = max(case.dense) + 3
        kv.append(
            DenseSegment(
                states(batch, case.kv_heads, width, case.head_dim).to(case.dense_dtype),
                states(batch, case.kv_heads, width, value_dim).to(case.dense_dtype),
                torch.tensor(case.dense, device=device()),
            )
        )
    query = torch.randn(batch, case.kv_heads * case.gqa, 1, case.head_dim, device=device())
    return query.to(case.dtype), kv


def build_from_store(
    spec: CacheSpec, visual: Tensor, real: Tensor, steps: int, head_dim: int = 64
) -> list[Segment]:
    """Segments of a one-layer cache after a prompt of these tokens and `steps` decoding steps."""
    torch.manual_seed(0)
    ledger, store = Ledger(spec, len(visual), device()), LayerStore(spec)
    one = torch.ones(len(visual), 1, dtype=torch.bool, device=device())
    for step in range(1 + steps):
        new = (visual, real) if step == 0 else (~one, one)
        plan = ledger.plan(*new)
        store.apply(plan, *(states(len(visual), 1, plan.tokens, head_dim) for _ in range(2)))
    return store.segments(ledger.state)


def poisoned(kv: Sequence[Segment]) -> list[Segment]:
    """Segments with NaN and 0xAA wherever no token is: kernels must not notice."""
    return [_poison_packed(s) if isinstance(s, PackedSegment) else _poison_dense(s) for s in kv]


def _poison_packed(segment: PackedSegment) -> PackedSegment:
    key, value = (_poison_tensor(t, segment.lengths) for t in (segment.key, segment.value))
    return replace(segment, key=key, value=value)


def _poison_tensor(x: PackedTensor, lengths: Tensor) -> PackedTensor:
    empty = ~valid_mask(lengths, x.tokens)[:, None, :, None]
    rows = empty if x.per_token else (x.blocks.sizes == 0)[:, None, :, None]
    changed = {}
    for name in x.tensor_names():
        tensor = getattr(x, name)
        where = empty if name in TOKEN_PARTS else rows
        where = where.unflatten(-1, (1,) * (tensor.dim() - 3))
        value = math.nan if tensor.is_floating_point() else POISON_BYTE
        changed[name] = tensor.masked_fill(where, value)
    return replace(x, **changed)


def _poison_dense(segment: DenseSegment) -> DenseSegment:
    empty = ~valid_mask(segment.lengths, segment.tokens)[:, None, :, None]
    key, value = (x.masked_fill(empty, math.nan) for x in (segment.key, segment.value))
    return replace(segment, key=key, value=value)


def reference(case: Case, query: Tensor, kv: Sequence[Segment]) -> Tensor:
    """`attend` in fp64, rounded to the query's type."""
    out = attend(query.double(), kv, sm_scale=case.sm_scale, tau=case.tau)
    return out.to(query.dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Relative RMS and maximum error within `TOLERANCES` of the output's type."""
    rms_limit, max_limit = TOLERANCES[expected.dtype]
    actual, expected = actual.double(), expected.double()
    error = actual - expected
    rms = float(error.norm() / expected.norm())
    worst = float(error.abs().max() / expected.abs().max())
    ok = actual.shape == expected.shape and rms <= rms_limit and worst <= max_limit
    assert ok, f"rms {rms:.2e} (limit {rms_limit}), max {worst:.2e} (limit {max_limit})"


def assert_near_half(actual: Tensor, expected: Tensor) -> None:
    """fp32 queries get what fp16 ones get."""
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        actual, expected = actual.half(), expected.half()
    assert_near(actual, expected)
