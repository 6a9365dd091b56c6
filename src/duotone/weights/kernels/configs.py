"""Table of kernels and tiles by shape, as measured on an H200; the one place to change."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from duotone.tools.kept import cached_once, kept
from duotone.weights.kernels.triton.gemm import GemmConfig
from duotone.weights.kernels.triton.gemv import GemvConfig
from duotone.weights.kernels.triton.split import SplitConfig
from duotone.weights.modules.packed_weight import PackedWeight

# Up to how many tokens the weight is read in splits, by bits; above, tiles of a full product.
MAX_SPLIT_TOKENS = {4: 512, 8: 127}
MAX_FLOAT_SPLIT_TOKENS = 64
_MULTIPROCESSORS = 132
# Programs of a split kernel that an H200 keeps busy.
_SPLIT_PROGRAMS = _MULTIPROCESSORS * 4
_MIN_SPLIT_INS = 512
# Where other shapes of a program of the kernel for one token are faster.
_MANY_OUTS, _MANY_INS = 16384, 8192
# Columns of a step with groups of scales: one group, or a part of a larger one.
_MAX_GROUP_STEP = 128
_MAX_STAGES = 8
# W8A8 in splits, by a tile's tokens: its outs, ins, warps, stages, and programs at one time on a
# multiprocessor.
_SPLIT_TILES = {
    16: (128, 256, 8, 3, 1),
    32: (128, 256, 8, 3, 1),
    64: (128, 256, 8, 3, 1),
    128: (64, 128, 4, 4, 2),
}
_MANY_TOKENS = GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2)
_FULL_TILE = 64
# After more rounds of tiles, a nearly empty last round does not matter.
_FEW_ROUNDS = 4
# W8A8's tiles, up to so many tokens: the first that all run at one time. Few tiles are cut into
# parts, and each tile has many bytes in flight.
_FEW_TILES = (
    GemmConfig(128, 64, 256, warps=4, stages=4, per_sm=1, parts=2),
    GemmConfig(128, 128, 128, warps=8, stages=6, per_sm=1, parts=4),
    GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2),
)
_ONE_ROUND = {
    _FULL_TILE: (
        GemmConfig(64, 32, 256, warps=4, stages=4, per_sm=2, parts=2),
        GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2),
    ),
    512: _FEW_TILES,
}


def preferred(tokens: int, bits: int) -> tuple[str, ...]:
    """Implementations for this many tokens, the fastest first."""
    few = "w4a8-fused" if bits == 4 else "w8a8-split"
    many = "w4a8-scratch" if bits == 4 else "w8a8"
    if tokens == 1:
        return ("gemv", few, many)
    # TMA is slow where rows are missing: tiles pay from the first that is full
    full = bits == 8 and tokens == _FULL_TILE
    found = (many, few) if full or tokens > MAX_SPLIT_TOKENS[bits] else (few, many)
    return ("w8a8-wgmma", *found) if bits == 8 else found


def gemm_config(tokens: int, weight: PackedWeight) -> GemmConfig:
    """Tiles of the W8A8 kernel, which unpacked weights of 4 bits take too."""
    if weight.group_size is not None:
        # Two sums per output, so half the outputs; three programs on an SM, which registers just
        # allow, alternate between tensor cores and scales.
        step, stages = _group_steps(weight.group_size, 128, 3)
        return GemmConfig(64, 128, step, warps=4, stages=stages, per_sm=3, registers=168)
    outs = weight.shape[0]
    for most, configs in _ONE_ROUND.items():
        if tokens <= most:
            found = _first_of_one_round(configs, tokens, outs)
            if found is not None:
                return found
            break
    if outs < 256:
        return GemmConfig(128, 128, 128, warps=4, stages=4, per_sm=0)
    return _MANY_TOKENS


def gemm_pieces(tokens: int, weight: PackedWeight) -> list[tuple[slice, GemmConfig]]:
    """(Channels of the weight, tiles) of one product, or of two where a round would be near empty.

    The first of two has whole rounds of large tiles, the other, of smaller ones, runs at one time.
    """
    config, outs = gemm_config(tokens, weight), weight.shape[0]
    tiles_m, tiles_n = math.ceil(tokens / config.tokens), math.ceil(outs / config.outs)
    slots = config.per_sm * _MULTIPROCESSORS
    whole, tail = divmod(tiles_m * tiles_n, slots) if slots else (0, 0)
    if 1 <= whole <= _FEW_ROUNDS and 0 < tail <= slots // 4 and weight.group_size is None:
        cut = whole * slots // tiles_m * config.outs
        smaller = _first_of_one_round(_FEW_TILES, tokens, outs - cut)
        if cut and smaller is not None:
            return [(slice(cut), config), (slice(cut, outs), smaller)]
    return [(slice(outs), config)]


def _first_of_one_round(configs: Iterable[GemmConfig], tokens: int, outs: int) -> GemmConfig | None:
    """The first whose tiles all run at one time."""
    for config in configs:
        tiles = math.ceil(tokens / config.tokens) * math.ceil(outs / config.outs)
        if tiles <= config.per_sm * _MULTIPROCESSORS:
            return config
    return None


def gemv_config(weight: PackedWeight) -> GemvConfig:
    """Rows and words per program of the kernel for one token."""
    outs, ins = weight.shape
    if weight.bits == 4:
        return GemvConfig(8, 256, 2) if outs >= _MANY_OUTS else GemvConfig(4, 512, 4)
    if outs >= _MANY_OUTS:
        return GemvConfig(4, 512, 2)
    return GemvConfig(8, 512, 8) if ins >= _MANY_INS else GemvConfig(4, 512, 4)


def split_config(tokens: int, weight: PackedWeight, floating: bool = False) -> SplitConfig:
    """Tiles and splits of the kernel for few tokens."""
    outs, ins = weight.shape
    tile = min(128, max(16, 1 << (tokens - 1).bit_length()))
    rows, warps = (64, 4) if tile <= 32 else (128, 8)
    step, stages, programs = 128, 3 if floating else 4, _SPLIT_PROGRAMS
    if weight.bits == 4 and not floating:
        stages = 3
        if tile <= 32:
            step = 256
        else:
            tile, warps, programs = 64, 4, _SPLIT_PROGRAMS // 2
    if weight.bits == 8:
        rows, step, warps, stages, per_sm = _SPLIT_TILES[tile]
        programs = _MULTIPROCESSORS * per_sm
    if weight.group_size is not None:
        step, stages = _group_steps(weight.group_size, step, stages)
    tiles = math.ceil(outs / rows) * math.ceil(tokens / tile)
    splits = max(1, min(programs // tiles, ins // _MIN_SPLIT_INS))
    return SplitConfig(rows, tile, step, splits, warps, stages)


def _group_steps(group_size: int, step: int, stages: int) -> tuple[int, int]:
    """(Columns per step, stages) within groups: as many bytes in flight as longer steps have."""
    within = min(group_size, _MAX_GROUP_STEP)
    return within, min(_MAX_STAGES, 1 + (stages - 1) * step // within)


@cached_once
def one(device: torch.device) -> Tensor:
    """A row scale of 1."""
    return kept(lambda: torch.ones(1, device=device), device)
