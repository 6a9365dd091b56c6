"""Cases of finding levels of blocks, on a GPU and on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.classes.levels import SortedLevels, torch_levels
from duotone.cache import BlockTable
from duotone.quant import TensorSpec

from cases import device
from pack_cases import BF16, FP16, FP32, dense_states

# Ranks and levels that may differ by more than a last bit: near ties, decided by the order of sums,
# and in blocks of few tokens each round of Lloyd's has some.
NEAR_TIES, OTHER_ENDS = 0.01, 0.05
# Squared error over that of the reference's levels: of all blocks, and of one with few tokens.
WORSE, WORSE_BLOCK = 1.001, 1.01


@dataclass(frozen=True)
class LevelCase:
    """A tensor's spec and its blocks. edges: offsets of each sequence's spans."""

    name: str
    spec: TensorSpec
    edges: tuple[tuple[int, ...], ...] = ((0, 63, 164), (0, 111, 111))
    head_dim: int = 32
    dtype: torch.dtype = BF16
    heads: int = 2
    offset: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-d{self.head_dim}{kind}-n{self.edges[0][-1]}"


CLASSES = ((4, 1 / 8), (2, 1 / 4), (1, 3 / 8))
LLOYD = TensorSpec(levels="lloyd", classes=CLASSES)
LEVEL_CASES = [
    LevelCase("uniform", TensorSpec(classes=CLASSES)),
    LevelCase("lloyd", LLOYD),
    LevelCase("energy", LLOYD.replace(energy=1.5, gain=1.25)),
    LevelCase("fit", LLOYD.replace(energy=1.0, gain="fit", group=64), ((0, 200), (0, 129))),
    LevelCase("fit", LLOYD.replace(gain="fit"), head_dim=40, dtype=FP32),
    LevelCase("fit", LLOYD.replace(energy=1.0, gain="fit"), ((0, 200),), heads=1),
    LevelCase("fit", LLOYD.replace(gain="fit"), ((0, 130, 300),), 72, heads=1),
    LevelCase("one bit", TensorSpec(1, levels="lloyd", gain=1.1), head_dim=20, dtype=FP16),
    LevelCase("two bits", TensorSpec(2, levels="lloyd", energy=0.5), head_dim=24, dtype=FP32),
    LevelCase("four bits", TensorSpec(4, levels="lloyd"), ((0, 100),), 16, FP32),
    LevelCase("shrunk", TensorSpec(2, shrink=0.9, gain="fit"), head_dim=16),
    LevelCase("halves", LLOYD.replace(energy=0.5), offset=1),
    LevelCase("ragged", LLOYD.replace(energy=1.0), ((0, 1, 101, 1001), (0, 0, 0, 0)), 40, heads=1),
    LevelCase("long", LLOYD.replace(energy=1.0, gain=1.1), ((0, 1100),), 16, heads=1),
]
# Long blocks on a real device only: strips of few channels, several parts.
LONG_CASES = [
    LevelCase("one sequence", LLOYD.replace(energy=1.5), ((0, 3328),), 128, heads=8),
    LevelCase("long", LLOYD.replace(energy=0.5), ((0, 8192), (0, 5000)), 128, heads=8),
    LevelCase("longest", LLOYD.replace(energy=1.0), ((0, 60000),), 64, FP16, heads=1),
    LevelCase("wide", LLOYD.replace(energy=1.0), ((0, 20000),), 256, FP32, heads=1),
    LevelCase("fit", LLOYD.replace(energy=1.0, gain="fit"), ((0, 3328),), 128, heads=8),
    LevelCase("fit", LLOYD.replace(gain="fit"), ((0, *range(200, 8001, 200)),) * 4, 256, heads=4),
    LevelCase("groups", LLOYD.replace(energy=1.0, gain="fit", group=64), ((0, 8192),), 128),
    LevelCase("groups", LLOYD.replace(gain="fit", group=128), ((0, 3328), (0, 111)), 256),
]


def level_states(case: LevelCase, seed: int = 0) -> tuple[Tensor, BlockTable]:
    """(x with a constant channel, one of three values and one that is far off; blocks)."""
    torch.manual_seed(seed)
    offsets = torch.tensor(case.edges, device=device())
    shape = (len(case.edges), case.heads, int(offsets.max()), case.head_dim)
    x = dense_states(shape, case.dtype, case.offset)
    x[..., 3] = 1.3
    x[..., 5] = (x[..., 5] > 0.5).to(case.dtype) * 2 - 7 + 8.3 * (x[..., 5] > 1)
    x[..., 6] += 40
    return x, BlockTable(offsets).split(case.spec.group)


def reference(case: LevelCase, x: Tensor, blocks: BlockTable) -> SortedLevels:
    return torch_levels(x, case.spec, blocks, Classes.of(case.spec, case.head_dim).channels)


def assert_same_levels(
    case: LevelCase, x: Tensor, ours: SortedLevels, theirs: SortedLevels
) -> None:
    """Levels of blocks with tokens: alike but for near ties, and no worse."""
    real = (theirs.blocks.sizes > 0)[:, None].expand(theirs.order.shape[:3])
    different = float((ours.order != theirs.order)[real].float().mean())
    assert different <= NEAR_TIES, f"{different:.2%} of ranks differ"
    by_channel = [
        [_by_channel(y, levels)[real] for y in _parts(levels)] for levels in (ours, theirs)
    ]
    for name, mine, other in zip(_NAMES, *by_channel, strict=True):
        far = float((_steps(mine) - _steps(other)).abs().gt(1).float().mean())
        assert far <= OTHER_ENDS, f"{far:.2%} of {name} are more than a last bit off"
    mine, other = (_errors(case, x, levels)[real] for levels in (ours, theirs))
    assert float(mine.sum()) <= WORSE * float(other.sum()) + 1e-6, float(mine.sum() / other.sum())
    assert (mine <= WORSE_BLOCK * other + 1e-6).all(), float((mine / other).max())


_NAMES = ("chosen_scale", "chosen_zero", "scale", "zero")


def _parts(levels: SortedLevels) -> list[Tensor]:
    return [getattr(levels, name) for name in _NAMES]


def _by_channel(sorted_parts: Tensor, levels: SortedLevels) -> Tensor:
    missing = levels.order.shape[-1] - sorted_parts.shape[-1]
    full = torch.nn.functional.pad(sorted_parts, (0, missing))
    return torch.empty_like(full).scatter_(-1, levels.order, full)


def _steps(x: Tensor) -> Tensor:
    """Numbers of fp16 in their order."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _errors(case: LevelCase, x: Tensor, levels: SortedLevels) -> Tensor:
    """Squared error of every block [batch, heads, blocks], what codes stand for against x."""
    slots = levels.blocks.to_slots(x).double()
    chosen_scale, chosen_zero, scale, zero = (
        _by_channel(part, levels).double()[..., None, :] for part in _parts(levels)
    )
    widths = torch.cat(
        [torch.full((n,), bits) for bits, n in Classes.of(case.spec, case.head_dim).sizes]
    )
    top = torch.zeros(case.head_dim, dtype=torch.double)
    top[: len(widths)] = 2.0**widths - 1
    top = top.to(x.device).expand_as(levels.order)
    top = torch.empty_like(top).scatter_(-1, levels.order, top)[..., None, :]
    steps = (slots - chosen_zero) / torch.where(chosen_scale > 0, chosen_scale, 1.0)
    codes = torch.floor(steps + 0.5).clamp_min(0).minimum(top) * (chosen_scale > 0)
    error = (codes * scale + zero - slots).square().sum(-1)
    return (error * levels.blocks.mask[:, None]).sum(-1)
