"""Cases of packing channels of unequal bits, on a GPU and on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import duotone
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.classes.pack import class_pack, prepared
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec, TensorSpec

from cases import (
    CALIBRATED,
    CLASSES_KEY,
    CLASSES_VALUE,
    PRESET_KEY,
    SMALL,
    SMALL_TILES,
    UNITS,
    device,
)
from pack_cases import BF16, FP16, FP32, dense_states, taken_anywhere


@dataclass(frozen=True)
class ClassCase:
    """Visual spans whose channels have unequal bits. edges: offsets of each sequence's spans."""

    name: str
    key: TensorSpec
    value: TensorSpec
    edges: tuple[tuple[int, ...], ...] = ((0, 300, 431), (0, 100, 100))
    head_dim: int = 128
    dtype: torch.dtype = BF16
    offset: int = 0
    heads: int = 2

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        flags = [f"offset{self.offset}"] * bool(self.offset)
        return "-".join([self.name, f"d{self.head_dim}{kind}", f"n{self.edges[0][-1]}", *flags])

    @property
    def spec(self) -> KVSpec:
        return KVSpec(self.key, self.value)


PRESETS = {bits: duotone.scheme("duotone-whole", bits=bits).visual for bits in (1, 2)}
ONE, TWO = ((visual.key, visual.value) for visual in PRESETS.values())
ROTATED = tuple(spec.replace(transform="hadamard") for spec in UNITS)
CLASS_CASES = [
    ClassCase("span", *CALIBRATED),
    ClassCase("one", *ONE),
    ClassCase("halves", *UNITS, head_dim=64),
    ClassCase("two", *TWO, head_dim=64, dtype=FP16),
    ClassCase("three", PRESET_KEY, CLASSES_VALUE, head_dim=80, dtype=FP32),
    ClassCase("wide", CLASSES_KEY, CLASSES_VALUE, ((0, 128), (0, 1)), 64),
    ClassCase("rotated", *ROTATED, head_dim=64),
    ClassCase("turned K", ROTATED[0], UNITS[1], head_dim=64, dtype=FP16),
    ClassCase("plain K", TensorSpec(2, group=64), UNITS[1], head_dim=96),
    ClassCase("plain V", CALIBRATED[0], TensorSpec(1, shrink=0.9), head_dim=104, dtype=FP16),
    ClassCase("span", *CALIBRATED, ((0, 111), (0, 0), (0, 63)), 256, FP32),
    ClassCase("one", *ONE, ((0, 700), (0, 333)), 64, offset=1),
    ClassCase("halves", *UNITS, ((0, 1),) * 5 + ((0, 200),), 64, heads=1),
    ClassCase("small", *SMALL),
    ClassCase("short", *SMALL, (tuple(range(0, 257, 64)), (0, 64, 124, 188, 252)), 64),
    ClassCase("small tiles", *SMALL_TILES, head_dim=80, dtype=FP16),
    ClassCase("small K", SMALL_TILES[0], UNITS[1], head_dim=64),
    ClassCase("small V", UNITS[0], SMALL[1], ((0, 300), (0, 0)), 64, FP32),
    ClassCase("span", *CALIBRATED, ((0, *(100 * i for i in range(1, 41))),), 64, heads=1),
]


def run_classes(case: ClassCase, seed: int = 0) -> tuple[PackedPair, PackedPair]:
    """(pair of the kernel, pair of torch), as `run_spans`."""
    key, value, piece = class_states(case, seed)
    return class_pack(key, value, case.spec, piece), packed_by_torch(key, value, case.spec, piece)


def packed_by_torch(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """Bytes that the kernel has to write; on a GPU by the levels that kernels find there."""
    if key.is_cuda:
        work = prepared(key, value, spec, piece)
        pair = PackedPair(
            replace(work.key_levels.packed(work.key, spec.key), dtype=key.dtype),
            replace(work.value_levels.packed(work.value, spec.value), dtype=value.dtype),
        )
    else:
        pair = PackedPair.pack(key, value, spec, piece)
    laid = pair.laid_out(class_layout)
    assert laid.records is not None
    return laid


def class_states(case: ClassCase, seed: int = 0) -> tuple[Tensor, Tensor, Piece]:
    torch.manual_seed(seed)
    offsets = torch.tensor(case.edges, device=device())
    batch, most = len(case.edges), int(offsets.max())
    shape = (batch, case.heads, most + 29, case.head_dim)
    key, value = (dense_states(shape, case.dtype, case.offset) for _ in range(2))
    return key, value, taken_anywhere(offsets, shape[2])


def assert_same_records(actual: PackedPair, expected: PackedPair) -> None:
    """Every byte and parameter, and what describes them; spans without tokens may have any."""
    assert actual.records.format == expected.records.format
    ours, theirs = (pair.records.tensors for pair in (actual, expected))
    assert ours.keys() == theirs.keys()
    real = (expected.value.blocks.sizes > 0)[:, None, :, None]
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        assert ours[name].is_contiguous(), name
        where = real if name not in ("data", "first") else True
        assert not ((ours[name] != tensor) & where).any(), name
    for name in ("key", "value"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one.spec, one.head_dim, one.dtype) == (other.spec, other.head_dim, other.dtype)
        assert one.blocks.same_as(other.blocks)
        assert not one.tensor_names()
